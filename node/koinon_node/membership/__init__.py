"""Membership of a node: registration, heartbeats, the lease, and news of the table."""
