"""The Redis protocol (RESP2 and RESP3): the listener for single operations."""
