"""A node's decisions, without I/O. The modules here: the bytes at rest, and the writes."""
