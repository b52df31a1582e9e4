"""Benchmarks of clients: operations, writes, routers, TLS, many connections."""
