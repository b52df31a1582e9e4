"""The copies of partitions: what they hold, who follows whom, who is in sync. Pure."""
