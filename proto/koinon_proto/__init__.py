"""What coordinator, node and client share: the wire contract, the table, errors, partitioners."""
