"""The coordinator's decisions, without I/O."""
