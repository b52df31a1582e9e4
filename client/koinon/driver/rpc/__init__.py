"""The gRPC link to one server: its channel, permission to send on it, requests and replies."""
