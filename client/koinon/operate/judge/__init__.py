"""Judgement of observations: health, machines, hotspots, sizes, progress. Free of I/O."""
