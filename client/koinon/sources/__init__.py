"""Rows of files, as ``load`` and ``ingest`` both read them."""
