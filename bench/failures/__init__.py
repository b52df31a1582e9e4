"""Failovers, stops and starved processes, on this machine and on networks of their own."""
