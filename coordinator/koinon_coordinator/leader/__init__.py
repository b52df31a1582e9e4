"""One term of a leading coordinator: membership, moves, operations, bulk loads."""
