"""Bulk loads of files through Spark: the parts of ``koinon ingest`` and of the demo."""
