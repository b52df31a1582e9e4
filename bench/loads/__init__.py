"""Bulk loads by Spark, their steps, and clients beside them."""
