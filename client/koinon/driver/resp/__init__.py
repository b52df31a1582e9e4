"""Operations over RESP: the event loop's connections to a node, and the threads' own sockets."""
