"""Replication: groups to followers, and following: streams, catch-up, acknowledgements."""
