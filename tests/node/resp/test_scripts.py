"""Scripts of clients of Redis in a real node: their bounds, and what a failed one leaves. What they
answer as redis-server does is in test_redis_replies.py.
"""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from koinon_node.resp.scripts.compiler import compiled
from koinon_node.resp.scripts.values import LuaError, Table
from tests.kit.addresses import free_address
from tests.node.kit.resp_client import RespClient
from tests.node.kit.scripted_coordinator import Script, ScriptedCoordinator
from tests.node.kit.support import running_node

A, B = "{t}a", "{t}b"


@pytest.fixture(scope="module")
def address(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    port, data = free_address(), tmp_path_factory.mktemp("scripts") / "n1"
    with (
        ScriptedCoordinator(Script(partitioner="crc16")) as coordinator,
        running_node(data, coordinator, "--redis-listen", port),
    ):
        yield port


@pytest.fixture
def client(address: str) -> Iterator[RespClient]:
    with RespClient(address) as connected:
        connected.call("DEL", A, B)
        yield connected


@pytest.mark.parametrize(
    ("source", "words"),
    [
        ("while true do end", "more than 10000 steps"),
        ("for i = 1, 1e300 do end", "more than 10000 steps"),
        ("local s = 'aaaaaaaa' while true do s = s .. s end", "more than 10000 steps"),
        ("return " + "+".join(["1"] * 7_000), "too long"),
        ("return " + "(" * 100 + "1" + ")" * 100, "more than 40 levels"),
        ("x" * 20_000, "16384 bytes at most"),
        ("local t = {} for i = 1, 99 do table.insert(t, t) end return t", "too large"),
        ("for i = 1, 600 do redis.call('ping') end", "calls 500 commands at most"),
        ("local f = function() end", "name expected near 'function'"),
        ("x = 1", "only a local variable"),
        ("local t = {} t[1] = 1", "only a local variable"),
        ("local t = {} t.x = 1", "only a local variable"),
        ("return string.format('%d', 3)", "attempt to call 'format' (a nil value)"),
        ("local f = 1 return f'text'", "attempt to call 'f' (a number value)"),
        ("table.insert(math, 1)", "takes a table and a value"),
        ("return nothing", "nonexistent global variable 'nothing'"),
        ("return redis.call('hget', KEYS[1], 'field')", "Unknown Redis command"),
        ("return redis.call('get', '{t}other')", "not among its KEYS"),
        ("return redis.call('eval', 'return 1', '0')", "not allowed from script"),
        ("return redis.call('keys', '*')", "not allowed from script"),
        ("return redis.call('koinon.get', KEYS[1], '0')", "not allowed from script"),
        ("return redis.call('get')", "Wrong number of args"),
        ("return redis.call('get', {})", "must be strings or integers"),
        ("return math.floor(1/0)", "bad argument"),
        ("--[[" * 100, "unfinished long"),
        ("return 1 +", "name expected near '<eof>'"),
        ("return '\\300'", "escape sequence too large"),
    ],
)
def test_script_is_refused_with_the_reason(client: RespClient, source: str, words: str) -> None:
    reply = client.call("EVAL", source, 1, A)
    assert isinstance(reply, Exception)
    assert words in str(reply)
    assert client.call("PING") == b"PONG"


def test_escapes_in_strings_are_those_of_lua(client: RespClient) -> None:
    source = r"""return 'a\065\0\n\\\'' .. "\"\9\a" """
    assert client.call("EVAL", source, 0) == b"aA\0\n\\'\"\t\a"


def test_lcs_of_a_first_value_that_would_hold_the_node_is_refused(client: RespClient) -> None:
    client.call("SET", A, "abcd" + "x" * 17_000)
    client.call("SET", B, "abcd")
    reply = client.call("LCS", A, B)
    assert "16384 here at most" in str(reply)
    assert client.call("LCS", B, A) == b"abcd"


def test_work_of_a_script_is_bounded_where_its_records_are_small(client: RespClient) -> None:
    client.call("SET", A, "ab" * 8_000)
    client.call("SET", B, "xy" * 100)
    repeated = "for i = 1, 20 do redis.call('lcs', KEYS[1], KEYS[2]) end"
    assert "bytes of records at most" in str(client.call("EVAL", repeated, 2, A, B))
    assert client.call("EVAL", "return redis.call('lcs', KEYS[1], KEYS[2])", 2, A, B) == b""


def test_script_that_fails_leaves_nothing_of_what_it_did(client: RespClient) -> None:
    client.call("SET", A, "before")
    source = (
        "redis.call('del', KEYS[1]) redis.call('set', KEYS[2], 'x') redis.call('incr', KEYS[2])"
    )
    assert (
        str(client.call("EVAL", source, 2, A, B)) == "ERR value is not an integer or out of range"
    )
    assert client.call("MGET", A, B) == [b"before", None]
    writes = "for i = 1, 100 do redis.call('append', KEYS[1], ARGV[1] .. ARGV[1]) end"
    assert "bytes at most beyond" in str(client.call("EVAL", writes, 1, A, "v" * 1_000))
    assert client.call("GET", A) == b"before"


def test_script_in_a_transaction_finds_what_came_before_it(client: RespClient) -> None:
    added = client.call("SCRIPT", "LOAD", "return redis.call('incrby', KEYS[1], ARGV[1])")
    client.call("MULTI")
    client.call("SET", A, "5")
    assert client.call("EVALSHA", added, 1, A, 2) == b"QUEUED"
    client.call("EVAL", "return redis.call('incr', 'elsewhere')", 1, A)
    client.call("GET", A)
    first, second, third, fourth = client.call("EXEC")
    assert (first, second, fourth) == (b"OK", 7, b"7")
    assert "not among its KEYS" in str(third)


def test_keys_of_a_script_lie_in_one_slot(client: RespClient) -> None:
    assert str(client.call("EVAL", "return 1", 2, "a", "b")).startswith("CROSSSLOT")


def test_only_the_scripts_that_were_used_lately_are_kept(client: RespClient) -> None:
    kept = client.call("SCRIPT", "LOAD", "return 'kept'")
    dropped = client.call("SCRIPT", "LOAD", "return 'dropped'")
    for n in range(255):
        client.call("EVAL", f"return {n}", 0)
        client.call("EVALSHA", kept, 0)
    assert client.call("SCRIPT", "EXISTS", kept, dropped) == [1, 0]
    assert str(client.call("EVALSHA", dropped, 0)).startswith("NOSCRIPT")
    assert client.call("SCRIPT", "FLUSH") == b"OK"
    assert client.call("SCRIPT", "EXISTS", kept) == [0]


def test_values_are_compared_in_the_step_that_writes(client: RespClient) -> None:
    steps = [
        (("SET", A, "1", "IFEQ", "x"), None),
        (("SET", A, "1", "IFNE", "x"), b"OK"),
        (("SET", A, "2", "IFEQ", "1", "EX", 100), b"OK"),
        (("SET", A, "3", "IFEQ", "1", "GET"), b"2"),
        (("SET", A, "3", "IFNE", "2"), None),
        (("GET", A), b"2"),
        (("DELEX", A, "IFEQ", "1"), 0),
        (("DELEX", A, "IFNE", "2"), 0),
        (("DELIFEQ", A, "1"), 0),
        (("DELIFEQ", A, "2"), 1),
        (("DELIFEQ", A, "2"), 0),
        (("DELEX", A, "IFNE", "2"), 0),
        (("SET", A, "4"), b"OK"),
        (("DELEX", A, "IFNE", "2"), 1),
        (("SET", A, "5"), b"OK"),
        (("DELEX", A), 1),
        (("MULTI",), b"OK"),
        (("SET", A, "6"), b"QUEUED"),
        (("DELIFEQ", A, "6"), b"QUEUED"),
        (("EXEC",), [b"OK", 1]),
    ]
    for number, (command, expected) in enumerate(steps):
        assert client.call(*command) == expected, number
    for command in (("SET", A, "1", "NX", "IFEQ", "1"), ("DELEX", A, "IFEQ"), ("DELEX", A, "NX")):
        assert str(client.call(*command)) == "ERR syntax error"


# --- the compiler alone --------------------------------------------------------------------------


@pytest.mark.parametrize("source", [b"return {", b"return {1,", b"return {a"])
def test_a_table_without_an_end_is_refused(source: bytes) -> None:
    with pytest.raises(LuaError):
        compiled(source)


def test_a_hexadecimal_number_beyond_floats_is_infinite() -> None:
    assert compiled(b"return 0x" + b"f" * 300).run({}) == float("inf")


def test_a_loop_that_ends_early_makes_no_further_numbers() -> None:
    script = compiled(b"for i = 1, 1e9, 1 do return i end")
    assert script.run({}) == 1.0
    assert compiled(b"for i = 3, 1, -1 do if i == 2 then return i end end").run({}) == 2.0


@pytest.mark.parametrize("loop", [b"local n = #ARGV", b"local n = type(ARGV)"])
def test_going_through_a_large_table_takes_steps(loop: bytes) -> None:
    script = compiled(b"for i = 1, 100 do " + loop + b" end return 1")
    assert script.run({"ARGV": Table.of([b"x"]), "type": lambda _: None}) == 1.0
    large = Table.of([b"x"] * 10_000)
    with pytest.raises(LuaError, match="steps"):
        script.run({"ARGV": large, "type": lambda _: None})
