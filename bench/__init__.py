"""Benchmarks: they print the figures of this machine. No test depends on them."""
