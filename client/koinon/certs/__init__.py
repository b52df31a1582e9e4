"""The certificate authority of a cluster: makes identity files, renews them, tells what they say.

An identity file is one PEM file: a private key, its certificate (the first one), and the
certificates of the authorities that its holder trusts. ``koinon_proto.security`` is what reads
them in servers and clients; nothing here is needed to use one.
"""
