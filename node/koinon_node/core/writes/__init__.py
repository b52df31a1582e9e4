"""The way of writes without I/O: decisions, updates, commit groups, the overlay."""
