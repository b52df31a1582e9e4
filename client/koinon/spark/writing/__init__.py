"""A Spark job that writes: planned, prepared, staged by tasks, committed."""
