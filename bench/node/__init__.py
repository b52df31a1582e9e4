"""One node alone: its store, its write-ahead log, what counting costs."""
