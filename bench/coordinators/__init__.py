"""Raft, the planner, many partitions, and a cluster at rest."""
