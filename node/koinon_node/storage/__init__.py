"""The store of a node: LMDB, its one writer, merges, checksums and the data directory."""
