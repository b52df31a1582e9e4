"""What operators ask of a cluster, how they ask for it, and what the answers mean."""
