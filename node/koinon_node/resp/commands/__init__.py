"""The commands: the table of all, and their families, which join it when they are imported."""
