"""``python -m demo``: a cluster of processes, real data, and things that go wrong."""
