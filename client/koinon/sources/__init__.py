"""Readers of files' rows, used by ``load`` and ``ingest``."""
