"""The same work by Koinon, by Redis and by etcd, each through its Python client, in one run.

``systems`` starts the servers and says what each promises; ``clients`` has one class a client;
``rows`` is the work, which ``worker``, a process a system, carries out; ``floors`` are what no
client can be faster than; ``report`` has the bars, the table and the plot.
"""
