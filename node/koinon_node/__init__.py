"""A storage node: hosts the partitions that the coordinator assigns to it and serves them."""
