"""Serves clients: the gRPC services, the engine of reads and writes, expiry, and the drain."""
