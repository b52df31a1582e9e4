"""The way to one server by gRPC: its channel, leave to send on it, requests and replies."""
