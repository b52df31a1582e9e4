"""The certificate authority of a cluster: makes, renews and inspects identity files.

An identity file is one PEM file: a private key, its certificate (the first one), and the
certificates of the authorities that its holder trusts. Servers and clients read it by
``koinon_proto.security``, which needs nothing of this package.
"""
