"""Keys and values of rows, made from Arrow columns."""
