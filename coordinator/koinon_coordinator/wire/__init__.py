"""Commands, snapshots and table updates in their encoded forms."""
