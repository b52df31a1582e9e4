"""Benchmarks: one runner (``__main__``), one table of scenarios, one report (``figures``)."""
