"""Real processes under real faults: schedules of them, the clients' histories, and their judgement.

    make nemesis                                        twenty schedules that were never run yet
    make nemesis KILLS=1000                             kill -9 of so many nodes and coordinators
    python -m tests.nemesis --help                      all else; --list: kinds of faults, defects
    python -m tests.nemesis --seeds 0-8 --faults split --defect serves-without-a-lease

Three coordinators, four nodes and three client processes, each in a network namespace of its own,
the members on disks of their own (ext4 in a file). A *schedule* follows from its seed, its kinds of
faults and its seconds alone. Once it is over, all faults end, the cluster must become well again,
every key is read once more, the copies are compared, and the history of each key is checked for
linearizability (tests/checkers). Nodes note each put that they are about to write; no value, which
clients never write twice, may have two versions.

What it takes: root, iproute2 and nftables for the network; e2fsprogs and loop devices for disks;
util-linux's ``unshare`` for time namespaces. Each means is tried first (means.py), and kinds of
faults that a machine does not allow are left out by name. Delay is netem's where the kernel has it,
else a link so narrow that packets queue. Clocks that run wrong do so for the members' Python code
(member.py), which is all that reads a clock to decide anything.

How to read what it prints: ``schedule 17: ok, 6,723 ok, 265 refused, 210 failed, 133 unknown; …``
counts operations by their end (a refused one's condition did not hold). A violation shows the
operation that does not fit, and what was around it. ``not well again`` is no violation of the data:
the cluster did not come back to what it should be, or a process ended that should not have. The
history is one JSON object a line (journal.py), and ``--judge FILE`` judges it again.

The keys of every other schedule lie in a keyspace of their own, those of the rest in ``default``.
Clients also commit atomic batches, over groups of keys that each batch writes whole (groups.py). A
group is judged as one register, so a half of a batch is what was never written. Single operations
go over RESP, and of one client over gRPC.

The reads that must not be stale: each client has a worker for every key, and a *split* leaves one
client, a reader most of the time, on the side of the primary that is cut off, while others write
the same keys through the next one. With a lease that is not looked at, it goes on reading there.
``pause-in-read`` stops a primary between its look at the lease and its answer, until another leads.
(An answer that comes so late is not stale by itself: it was asked for before others led. A primary
that takes new reads then would give stale ones.)
"""
