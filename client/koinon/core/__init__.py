"""The client's decisions, without I/O: routes, batches, retries, and the fate of each row."""
