"""The contract that all processes agree on: table, errors, partitioners, columns, bounds."""
