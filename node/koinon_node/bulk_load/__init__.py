"""Bulk loads on a node: staged chunks, merges of committed loads, reads in columns."""
