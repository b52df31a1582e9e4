"""Partitions that move to a node that joins, beside a bare copy."""
