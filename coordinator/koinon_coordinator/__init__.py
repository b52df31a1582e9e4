"""Koinon's coordinator: the replicated owner of the table that maps partitions to nodes."""
