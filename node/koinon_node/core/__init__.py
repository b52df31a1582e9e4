"""What a node decides, without I/O: leases, assignment, sequencing and conditions, encodings."""
