"""Reads, scans, writes, expiry and drops of the partitions that this node has."""
