"""Carries out the core's decisions over asyncio, sockets and gRPC."""
