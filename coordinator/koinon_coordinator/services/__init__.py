"""The gRPC services of a coordinator: messages in, messages out."""
