"""Shared by coordinator, node and client: the wire contract, the table, errors, partitioners."""

import os

# gRPC's handlers of fork() crash about a third of the children that a process with channels forks,
# before they can exec (grpc/grpc#43055): PySpark starts its Java like that. Nothing here goes on
# with gRPC in a forked child, so the handlers are left out; gRPC reads this when it is imported.
os.environ.setdefault("GRPC_ENABLE_FORK_SUPPORT", "0")
# gRPC's core tells of each handshake that fails in a line of its own on stderr, as often as a
# stranger likes, and clients in the middle of a user's terminal. What matters comes as an error.
os.environ.setdefault("GRPC_VERBOSITY", "NONE")
