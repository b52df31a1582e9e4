"""Backups of a cluster: made at one consistent cut, kept as Parquet files, checked and restored."""
