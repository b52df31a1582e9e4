"""Commands for data: get, put, scan, load, ingest."""
