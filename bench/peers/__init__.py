"""The same work by Koinon, by Redis and by etcd, each through its Python client, in one run."""
