"""Judgement of what was observed: health, machines, hot spots, sizes, progress. Free of I/O."""
