"""The table of commands. COMMAND, the checks of arguments and rights, metrics and the audit log use
it.

A row has the name, the number of words (negative: at least so many), the handler, the positions of
the keys, the actions that a user needs on them, Redis's flags and, for a handler that a factory
builds, the summary.
"""

from __future__ import annotations

from koinon_node.core.writes.updates import ANY_RECORD, ExpiryKind, Presence, RecordIf
from koinon_node.resp import wire
from koinon_node.resp.commands import (
    bits,
    cluster,
    info,
    introspection,
    keys,
    passed,
    replies,
    scans,
    scripting,
    server,
    strings,
    subsequences,
    transactions,
)
from koinon_node.resp.commands import koinon_commands as own
from koinon_node.resp.commands.spec import COMMANDS, Handler, Needs, Spec
from koinon_proto.contract.access import Action
from koinon_proto.server.requests import Method

_NONE, _FIRST, _TWO, _ALL = (0, 0, 0), (1, 1, 1), (1, 2, 1), (1, -1, 1)
_COUNTED = (-1, -1, -1)
"""The second argument is the number of keys."""
_PAIRS, _AFTER_ONE, _SECOND = (1, -1, 2), (2, -1, 1), (2, 2, 1)
# ANY: everybody may send the command, or its handler checks the caller.
_ANY: Needs = ()
_READ: Needs = (Action.READ,)
_WRITE: Needs = (Action.WRITE,)
_BOTH: Needs = (Action.READ, Action.WRITE)
_SCAN: Needs = (Action.SCAN,)
_LOAD: Needs = (Action.LOAD,)
_ABSENT = RecordIf(Presence.ABSENT)
_UPDATE = "write denyoom fast"
_AFTER, _AT = ExpiryKind.AFTER, ExpiryKind.AT

_ABOUT_ALL_KEYS = (
    *("DBSIZE", "FLUSHALL", "FLUSHDB", "KEYS", "KOINON.GETMANY", "KOINON.SCAN", "SCAN"),
)
"""Commands on a keyspace without keys among their words; the audit log names the keyspace."""
_TIPS = {
    "DBSIZE": ("request_policy:all_shards", "response_policy:agg_sum"),
    "DEL": ("request_policy:multi_shard", "response_policy:agg_sum"),
    "EXISTS": ("request_policy:multi_shard", "response_policy:agg_sum"),
    "INFO": ("nondeterministic_output", "request_policy:all_shards", "response_policy:special"),
    "MGET": ("request_policy:multi_shard",),
    "MSET": ("request_policy:multi_shard", "response_policy:all_succeeded"),
    "PING": ("request_policy:all_shards", "response_policy:all_succeeded"),
    "SCAN": ("nondeterministic_output", "request_policy:special", "response_policy:special"),
    "UNLINK": ("request_policy:multi_shard", "response_policy:agg_sum"),
    "WAIT": ("request_policy:all_shards", "response_policy:agg_min"),
}


def _spec(
    name: str,
    arity: int,
    handler: Handler,
    places: tuple[int, int, int],
    needs: Needs,
    flags: str,
    summary: str = "",
) -> Spec:
    """Build one row. The summary of a handler that no factory built is its docstring."""
    return Spec(
        name=name,
        arity=arity,
        handler=handler,
        summary=summary or (handler.__doc__ or "").partition("\n")[0],
        method=Method("Redis", name, stream=False),
        needs=needs,
        flags=frozenset(flags.split()),
        keys=_NONE if places is _COUNTED else places,
        counts_keys=places is _COUNTED,
        is_about_all_keys=name in _ABOUT_ALL_KEYS,
        tips=_TIPS.get(name, ()),
    )


# fmt: off
ALL: tuple[Spec, ...] = (
    # --- strings
    _spec("GET", 2, strings.reads_one(replies.value_or_nil), _FIRST, _READ, "readonly fast",
          "Read a value."),
    _spec("MGET", -2, strings.reads_all(replies.values_or_nils), _ALL, _READ, "readonly fast",
          "Read values."),
    _spec("STRLEN", 2, strings.reads_one(replies.length_of), _FIRST, _READ, "readonly fast",
          "Return the length of a value."),
    _spec("GETRANGE", 4, strings.getrange, _FIRST, _READ, "readonly"),
    _spec("SUBSTR", 4, strings.getrange, _FIRST, _READ, "readonly"),
    _spec("SET", -3, strings.set_, _FIRST, _WRITE, "write denyoom"),
    _spec("GETSET", 3, strings.assigns(ANY_RECORD, replies.value_before), _FIRST, _BOTH, _UPDATE,
          "Write a value; return the value before."),
    _spec("SETNX", 3, strings.assigns(_ABSENT, replies.one_if_written), _FIRST, _WRITE, _UPDATE,
          "Write a value if the key has none."),
    _spec("SETEX", 4, strings.sets_until("setex", 1_000), _FIRST, _WRITE, "write denyoom",
          "Write a value that expires after so many seconds."),
    _spec("PSETEX", 4, strings.sets_until("psetex", 1), _FIRST, _WRITE, "write denyoom",
          "Write a value that expires after so many milliseconds."),
    _spec("MSET", -3, strings.mset, _PAIRS, _WRITE, "write denyoom"),
    _spec("MSETNX", -3, strings.msetnx, _PAIRS, _WRITE, "write denyoom"),
    _spec("DELEX", -2, strings.delex, _FIRST, _BOTH, "write fast"),
    _spec("DELIFEQ", 3, strings.delifeq, _FIRST, _BOTH, "write fast"),
    _spec("GETDEL", 2, strings.getdel, _FIRST, _BOTH, "write fast"),
    _spec("GETEX", -2, strings.getex, _FIRST, _BOTH, "write fast"),
    _spec("APPEND", 3, strings.append, _FIRST, _BOTH, _UPDATE),
    _spec("SETRANGE", 4, strings.setrange, _FIRST, _BOTH, "write denyoom"),
    _spec("INCR", 2, strings.increments(1, by_argument=False), _FIRST, _BOTH, _UPDATE,
          "Add one."),
    _spec("DECR", 2, strings.increments(-1, by_argument=False), _FIRST, _BOTH, _UPDATE,
          "Take one away."),
    _spec("INCRBY", 3, strings.increments(1, by_argument=True), _FIRST, _BOTH, _UPDATE,
          "Add."),
    _spec("DECRBY", 3, strings.increments(-1, by_argument=True), _FIRST, _BOTH, _UPDATE,
          "Take away."),
    _spec("INCRBYFLOAT", 3, strings.incrbyfloat, _FIRST, _BOTH, _UPDATE),
    _spec("LCS", -3, subsequences.lcs, _TWO, _READ, "readonly"),
    # --- bits
    _spec("SETBIT", 4, bits.setbit, _FIRST, _BOTH, "write denyoom"),
    _spec("GETBIT", 3, bits.getbit, _FIRST, _READ, "readonly fast"),
    _spec("BITCOUNT", -2, bits.bitcount, _FIRST, _READ, "readonly"),
    _spec("BITPOS", -3, bits.bitpos, _FIRST, _READ, "readonly"),
    _spec("BITOP", -4, bits.bitop, _AFTER_ONE, _BOTH, "write denyoom"),
    # --- keys
    _spec("DEL", -2, keys.delete, _ALL, _WRITE, "write"),
    _spec("UNLINK", -2, keys.delete, _ALL, _WRITE, "write fast"),
    _spec("EXISTS", -2, strings.reads_all(replies.count_found), _ALL, _READ, "readonly fast",
          "Say how many of the keys are there."),
    _spec("TOUCH", -2, strings.reads_all(replies.count_found), _ALL, _READ, "readonly fast",
          "Say how many of the keys are there."),
    _spec("TYPE", 2, strings.reads_one(replies.type_of), _FIRST, _READ, "readonly fast",
          "Return the type of a value: always string."),
    _spec("OBJECT", -2, keys.object_, _SECOND, _READ, "readonly",
          "Return properties of a value's encoding, as Redis does."),
    _spec("RENAME", 3, keys.renames(wire.OK, replaced=True), _TWO, _BOTH, "write",
          "Rename a key, replacing a record of the new name."),
    _spec("RENAMENX", 3, keys.renames(wire.ONE, replaced=False), _TWO, _BOTH, "write fast",
          "Rename a key if the new name has no record."),
    _spec("COPY", -3, keys.copy, _TWO, _BOTH, "write denyoom"),
    _spec("TTL", 2, keys.tells_expiry(1_000, is_left=True), _FIRST, _READ, "readonly fast",
          "Return the seconds until a record expires."),
    _spec("PTTL", 2, keys.tells_expiry(1, is_left=True), _FIRST, _READ, "readonly fast",
          "Return the milliseconds until a record expires."),
    _spec("EXPIRETIME", 2, keys.tells_expiry(1_000, is_left=False), _FIRST, _READ, "readonly fast",
          "Return the expiry of a record as Unix time in seconds."),
    _spec("PEXPIRETIME", 2, keys.tells_expiry(1, is_left=False), _FIRST, _READ, "readonly fast",
          "Return the expiry of a record as Unix time in milliseconds."),
    _spec("EXPIRE", -3, keys.expires("expire", _AFTER, 1_000), _FIRST, _WRITE, "write fast",
          "Let a record expire after so many seconds."),
    _spec("PEXPIRE", -3, keys.expires("pexpire", _AFTER, 1), _FIRST, _WRITE, "write fast",
          "Let a record expire after so many milliseconds."),
    _spec("EXPIREAT", -3, keys.expires("expireat", _AT, 1_000), _FIRST, _WRITE, "write fast",
          "Let a record expire at a Unix time in seconds."),
    _spec("PEXPIREAT", -3, keys.expires("pexpireat", _AT, 1), _FIRST, _WRITE, "write fast",
          "Let a record expire at a Unix time in milliseconds."),
    _spec("PERSIST", 2, keys.persist, _FIRST, _WRITE, "write fast"),
    # --- many keys; the handlers check the caller's right to the prefix
    _spec("SCAN", -2, scans.scan, _NONE, _SCAN, "readonly"),
    _spec("KEYS", 2, scans.keys, _NONE, _SCAN, "readonly"),
    _spec("DBSIZE", 1, scans.dbsize, _NONE, _ANY, "readonly"),
    _spec("FLUSHDB", -1, server.flush, _NONE, _LOAD, "write"),
    _spec("FLUSHALL", -1, server.flush, _NONE, _LOAD, "write"),
    # --- transactions and scripts; the commands in them are checked one by one
    _spec("MULTI", 1, transactions.multi, _NONE, _ANY, "fast noscript"),
    _spec("EXEC", 1, transactions.exec_, _NONE, _ANY, "noscript"),
    _spec("DISCARD", 1, transactions.discard, _NONE, _ANY, "fast noscript"),
    _spec("WATCH", -2, transactions.watch, _ALL, _READ, "fast noscript"),
    _spec("UNWATCH", 1, transactions.unwatch, _NONE, _ANY, "fast noscript"),
    _spec("EVAL", -3, scripting.eval_, _COUNTED, _BOTH, "noscript movablekeys"),
    _spec("EVALSHA", -3, scripting.evalsha, _COUNTED, _BOTH, "noscript movablekeys"),
    _spec("SCRIPT", -2, scripting.script, _NONE, _ANY, "noscript",
          "Load, look up or forget scripts for EVALSHA."),
    # --- the connection, the server and the cluster
    _spec("PING", -1, server.ping, _NONE, _ANY, "fast"),
    _spec("ECHO", 2, server.echo, _NONE, _ANY, "fast"),
    _spec("TIME", 1, server.time_, _NONE, _ANY, "fast"),
    _spec("QUIT", -1, server.quit_, _NONE, _ANY, "no_auth"),
    _spec("HELLO", -1, server.hello, _NONE, _ANY, "fast no_auth"),
    _spec("AUTH", -2, server.auth, _NONE, _ANY, "fast no_auth"),
    _spec("SELECT", 2, server.select, _NONE, _ANY, "fast"),
    _spec("RESET", 1, server.reset, _NONE, _ANY, "fast"),
    _spec("CLIENT", -2, server.client, _NONE, _ANY, "", "Say something of the connection, or ask."),
    _spec("INFO", -1, info.info, _NONE, _ANY, ""),
    _spec("SLOWLOG", -2, info.slowlog, _NONE, _ANY, ""),
    _spec("COMMAND", -1, introspection.command, _NONE, _ANY, ""),
    _spec("CONFIG", -2, introspection.config, _NONE, _ANY, "",
          "Return settings of the server."),
    _spec("CLUSTER", -2, cluster.cluster, _NONE, _ANY, "", "Tell where the slots are."),
    _spec("READONLY", 1, server.accepted, _NONE, _ANY, "fast",
          "Answer OK: reads go to primaries in any case."),
    _spec("READWRITE", 1, server.accepted, _NONE, _ANY, "fast",
          "Answer OK: reads go to primaries in any case."),
    _spec("ASKING", 1, server.accepted, _NONE, _ANY, "fast",
          "Answer OK: no node redirects by ASK."),
    _spec("WAIT", 3, cluster.wait, _NONE, _ANY, ""),
    # --- Koinon's own clients, and nodes
    _spec("KOINON.HELLO", -3, own.hello, _NONE, _ANY, "no_auth"),
    _spec("KOINON.GET", -3, own.reads(replies.value_or_nil), _FIRST, _READ, "readonly fast",
          "Read a value."),
    _spec("KOINON.ENTRY", -3, own.reads(own.entry_or_nil), _FIRST, _READ, "readonly fast",
          "Read a value with its version and its expiry."),
    _spec("KOINON.EXISTS", -3, own.reads(replies.count_found), _FIRST, _READ, "readonly fast",
          "Return whether a key has a record."),
    _spec("KOINON.PUT", -7, own.put, _FIRST, _WRITE, "write"),
    _spec("KOINON.DELETE", -5, own.delete, _FIRST, _WRITE, "write"),
    _spec("KOINON.INCREMENT", -6, own.increment, _FIRST, _BOTH, "write", "Add to an integer."),
    _spec("KOINON.TOUCH", -5, own.touch, _FIRST, _WRITE, "write", "Change when a record expires."),
    _spec("KOINON.GETORPUT", -6, own.get_or_put, _FIRST, _BOTH, "write",
          "Read a record, or create it."),
    _spec("KOINON.GETMANY", -2, own.get_many, _NONE, _READ, "readonly"),
    _spec("KOINON.SCAN", -2, own.scan, _NONE, _SCAN, "readonly"),
    _spec("KOINON.PASSED", -3, passed.passed, _NONE, _ANY, "admin"),
    _spec("KOINON.FOLLOW", 2, own.follow, _NONE, _ANY, "admin"),
)
# fmt: on
COMMANDS.update((spec.name.encode(), spec) for spec in ALL)
