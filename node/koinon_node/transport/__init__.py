"""Replication between nodes on the wire: over sockets of the Redis port, or over gRPC."""
