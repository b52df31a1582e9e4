"""Operators' calls to a cluster, and judgement of the answers."""
