"""Shared by all our processes: logs, clocks, memory, signals, private files."""
