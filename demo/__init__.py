"""``python -m demo``: a cluster of processes, real data, and failures on purpose."""
