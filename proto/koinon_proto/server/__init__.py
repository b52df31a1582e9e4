"""Shared by all our gRPC servers: admission, guard, requests, metrics."""
