"""Operators' calls to a cluster, and the meaning of the answers."""
