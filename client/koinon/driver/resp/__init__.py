"""Single operations over RESP: a node's connections of the event loop, and sockets of threads."""
