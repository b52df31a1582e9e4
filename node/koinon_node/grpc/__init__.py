"""The gRPC services of a node, and the checks of their messages."""
