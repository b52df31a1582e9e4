"""What all processes must agree on: table, errors, partitioners, columns, bounds."""
