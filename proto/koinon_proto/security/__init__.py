"""Identities, TLS on every port and channel, and which callers may call what."""
