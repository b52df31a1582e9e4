"""What clients get from a cluster: operations, writes, routers, TLS, many connections."""
