"""A node's place in the cluster: its partitions, its lease, its own health, its leaving. Pure."""
