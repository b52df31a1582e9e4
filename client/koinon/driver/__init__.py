"""Carries out over asyncio and gRPC what the core decides."""
