"""Encodes keys and values of rows from Arrow columns, and decodes them."""
