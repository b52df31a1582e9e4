"""What the client decides, without I/O: routes, batches, retries, and what became of each row."""
