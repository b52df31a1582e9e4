"""Files into the cluster by way of Spark: what ``koinon ingest`` and the demo are made of."""
