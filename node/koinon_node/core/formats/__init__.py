"""The bytes at rest and towards the log: keys, records, log segments, frames."""
