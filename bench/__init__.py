"""Benchmarks: figures of the machine at hand. No test depends on them."""
