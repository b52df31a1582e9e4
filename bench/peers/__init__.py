"""Benchmarks of Koinon, Redis and etcd with the same work, each through its Python client, in one
run.
"""
