"""The terminal: sessions, output, signals, units."""
