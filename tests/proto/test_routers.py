"""Routers: each form gives the same answer, prefixes are judged rightly, and names and fingerprints
say what a process would answer.
"""

from __future__ import annotations

from collections.abc import Callable
from hashlib import sha256
from types import SimpleNamespace
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from koinon_proto import routers
from koinon_proto.contract.errors import ConfigurationError, PartitionerMismatchError
from koinon_proto.contract.keyspaces import default_keyspace
from koinon_proto.fingerprint import fixed_keys
from koinon_proto.partitioner import (
    Partitioner,
    canonical_name,
    murmur2,
    partitioner,
    partitioner_of,
    sure_partitioner,
)
from koinon_proto.routers import KeyRouter, router
from tests.kit.tables import config_of

SF = bytes.fromhex("08928308280fffff")  # in San Francisco, resolution 9
SF_3 = bytes.fromhex("0832830fffffffff")
TEXTS = (
    *("whole", "tag", "until:2f", "until:2f,2", "until:00", "until:ff,3", "until:7b"),
    *("first:1", "first:8", "first:13", "first:500", "h3:0", "h3:3", "h3:9", "h3:15"),
)
HASHES = ("murmur2", "md5", "crc16")
ROUTING = {
    ("until:2f", b"city/driver/7"): b"city",
    ("until:2f", b"city"): b"city",
    ("until:2f", b"/x"): b"",
    ("until:2f", b""): b"",
    ("until:2f,2", b"city/driver/7"): b"city/driver",
    ("until:2f,2", b"city/driver"): b"city/driver",
    ("until:2f,2", b"a//b"): b"a/",
    ("until:2F,1", b"a/b"): b"a",
    ("tag", b"{u1}.x"): b"u1",
    ("tag", b"a{}{u1}"): b"a{}{u1}",
    ("tag", b"a{{u1}}"): b"{u1",
    ("tag", b"}a{b"): b"}a{b",
    ("first:3", b"abcdef"): b"abc",
    ("first:3", b"ab"): b"ab",
    ("h3:3", SF + b"/driver"): SF_3,
    ("h3:3", SF_3): SF_3,
    ("h3:9", SF): SF,
    ("h3:10", SF + b"x"): SF + b"x",
    ("h3:3", SF[:7]): SF[:7],
    ("h3:3", b"\x07" + SF[1:]): b"\x07" + SF[1:],
    ("h3:3", b"text that is no cell"): b"text that is no cell",
    ("whole", b"a/b"): b"a/b",
}


@pytest.mark.parametrize(("given", "expected"), ROUTING.items())
def test_routing_bytes_are(given: tuple[str, bytes], expected: bytes) -> None:
    text, key = given
    assert router(text).routing_bytes(key) == expected
    spans = router(text).spans(*columns_of([b"before", key, b"behind"]))
    assert cut(spans)[1] == expected


def columns_of(keys: list[bytes]) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    offsets: np.ndarray = np.cumsum([0, *map(len, keys)]).astype(np.int64)
    return np.frombuffer(b"".join(keys), np.uint8), offsets[:-1], offsets[1:]


def cut(spans: tuple[np.ndarray, np.ndarray, np.ndarray]) -> list[bytes]:
    data, starts, ends = spans
    return [data[a:b].tobytes() for a, b in zip(starts.tolist(), ends.tolist(), strict=True)]


# --- every form --------------------------------------------------------------------------------


def every_form(p: Partitioner, keys: list[bytes]) -> list[np.ndarray]:
    data, starts, ends = columns_of(keys)
    offsets = np.append(starts, ends[-1:] if len(ends) else 0)
    padded = pa.array([b"x/" * 3, *keys, b"{y}"], pa.binary())[1:-1]
    forms = [
        p.partitions_of(keys),
        p.partitions_of(tuple(keys)),
        p.partitions_of_buffers(data, offsets),
        p.partitions_of_buffers(data, offsets.astype(np.int32)),
        p.partitions_of_arrow(pa.array(keys, pa.binary())),
        p.partitions_of_arrow(pa.array(keys, pa.large_binary())),
        p.partitions_of_arrow(padded),
        p.partitions_of_arrow(pa.chunked_array([keys[:1], keys[1:]], pa.binary())),
    ]
    if keys and len(set(map(len, keys))) == 1 and keys[0]:
        forms.append(p.partitions_of_arrow(pa.array(keys, pa.binary(len(keys[0])))))
    return forms


PIECES = st.sampled_from([b"/", b"//", b"{", b"}", b"\0", b"\xff\xff", b"a", b"bc" * 9, SF, SF_3])
KEYS = st.lists(PIECES, max_size=8).map(b"".join) | st.binary(max_size=40)


@settings(max_examples=150, deadline=None)
@given(
    keys=st.lists(KEYS, max_size=150),
    text=st.sampled_from(TEXTS),
    hash_name=st.sampled_from(HASHES),
)
def test_every_form_of_any_keys_agrees(keys: list[bytes], text: str, hash_name: str) -> None:
    p = partitioner(f"{hash_name}({text})", 64)
    expected = [p.partition_of_routing(router(text).routing_bytes(key)) for key in keys]
    assert [p.partition_of(key) for key in keys] == expected
    for found in every_form(p, keys):
        assert found.dtype == np.uint32
        assert found.tolist() == expected


@settings(max_examples=100, deadline=None)
@given(data=st.data(), text=st.sampled_from(TEXTS), rows=st.integers(33, 90))
def test_every_form_of_keys_of_one_length_agrees(data: st.DataObject, text: str, rows: int) -> None:
    """Keys of one length are hashed by a shorter way through columns."""
    shape = data.draw(KEYS)
    keys = [shape + b"%03d" % row for row in range(rows)]
    p = partitioner(f"murmur2({text})", 1_000)
    expected = [p.partition_of(key) for key in keys]
    for found in every_form(p, keys):
        assert found.tolist() == expected


def ten_thousand(text: str) -> list[bytes]:
    """Keys that are like those that the router is for."""
    name = text.partition(":")[0]
    drawn = [sha256(b"%d" % n).digest() for n in range(10_000)]
    if name == "h3":
        return [SF[:4] + d[:4] + b"/%d" % n for n, d in enumerate(drawn)]
    joints = {"tag": (b"{", b"}")}.get(name, (b"/", b"/"))
    return [d[:2].hex().encode() + joints[0] + d[2:4] + joints[1] + d[4:6] for d in drawn]


TEN_THOUSAND = {
    "whole": "03ed4bdcb300c0b5",
    "tag": "c2ccb7dab4df0bd0",
    "until:2f": "00294e5afadee913",
    "until:2f,2": "cab3668cd6ff36c8",
    "first:3": "7971607d97601e52",
    "h3:3": "706f9ab5e5a276ca",
    "h3:7": "aceb91854f3e022b",
}
"""SHA-256 over the partitions of 10,000 keys, of each hash: they never change."""


@pytest.mark.parametrize(("text", "digest"), TEN_THOUSAND.items())
def test_partitions_of_ten_thousand_keys_never_change(text: str, digest: str) -> None:
    answers = sha256()
    keys = ten_thousand(text)
    for hash_name in HASHES:
        p = partitioner(f"{hash_name}({text})", 1_024)
        expected = [p.partition_of(key) for key in keys]
        for found in every_form(p, keys):
            assert found.tolist() == expected
        answers.update(found.astype("<u4").tobytes())
    assert answers.hexdigest()[:16] == digest


def braced() -> list[bytes]:
    """Keys of up to 16 bytes, most of them braces in any places."""
    alphabet = b"{}{}{}ab\0\xff\r\n /0"
    drawn = ((n % 17, sha256(b"%d" % n).digest()) for n in range(10_000))
    return [bytes(alphabet[b % len(alphabet)] for b in data[:length]) for length, data in drawn]


def test_slots_of_ten_thousand_keys_with_braces_are_those_of_redis() -> None:
    """The digest is of what Redis 7.0.15 answered to CLUSTER KEYSLOT for each of them."""
    keys, slots = braced(), partitioner("crc16", 16_384)
    expected = [slots.partition_of(key) for key in keys]
    answers = b"".join(slot.to_bytes(2, "little") for slot in expected)
    assert sha256(answers).hexdigest()[:16] == "68f850da1baac1a9"
    for found in every_form(slots, keys):
        assert found.tolist() == expected
    tagged = partitioner("crc16(tag)", 16_384)
    assert [tagged.partition_of(key) for key in keys] == expected
    assert len(set(expected)) == 5_136


def test_more_keys_than_a_block_agree() -> None:
    keys = [b"%d/%d" % (n % 977, n) for n in range(70_000)]
    keys[40_000] = b"no delimiter"
    p = partitioner("murmur2(until:2f)", 1_024)
    found = p.partitions_of_arrow(pa.array(keys, pa.binary())).tolist()
    assert found == p.partitions_of(keys).tolist()
    assert found == [p.partition_of(key) for key in keys]
    assert len(set(found)) < 977


@pytest.mark.parametrize("hash_name", HASHES)
def test_hash_of_routing_bytes_gives_the_partition(hash_name: str) -> None:
    p = partitioner(f"{hash_name}(until:2f)", 64)
    for key in (b"a/b", b"c", b""):
        number = p.hash_of(p.routing_bytes(key))
        expected = {
            "murmur2": (number & 0x7FFFFFFF) % 64,
            "md5": number % 64,
            "crc16": number * 64 // 16_384,
        }
        assert p.partition_of(key) == expected[hash_name]
    assert partitioner("murmur2(until:2f)", 64).hash_of(b"a") == murmur2(b"a")


# --- prefixes ----------------------------------------------------------------------------------


@settings(max_examples=400, deadline=None)
@given(prefix=KEYS, behind=st.lists(KEYS, max_size=5), text=st.sampled_from(TEXTS))
def test_prefix_that_has_a_partition_has_that_of_all_its_keys(
    prefix: bytes, behind: list[bytes], text: str
) -> None:
    p = partitioner(f"murmur2({text})", 60_000)
    found = p.partition_of_prefix(prefix)
    if found is not None:
        assert {p.partition_of(prefix + more) for more in (*behind, b"")} == {found}


@pytest.mark.parametrize(
    ("text", "prefix", "is_one"),
    [
        ("whole", b"a/b", False),
        ("until:2f", b"a/", True),
        ("until:2f", b"a", False),
        ("until:2f,2", b"a/b", False),
        ("until:2f,2", b"a/b/", True),
        ("tag", b"x{u}", True),
        ("tag", b"x{u", False),
        ("tag", b"x{}{u}", False),
        ("first:3", b"abc", True),
        ("first:3", b"ab", False),
        ("h3:3", SF, True),
        ("h3:3", SF + b"/d", True),
        ("h3:3", SF[:7], False),
        ("h3:10", SF, False),
    ],
)
def test_prefix_asks_one_partition_where_it_has_the_routing_bytes(
    text: str, prefix: bytes, is_one: bool
) -> None:
    found = partitioner(f"murmur2({text})", 1_024).partition_of_prefix(prefix)
    assert (found is not None) == is_one


def test_prefix_with_a_hash_tag_asks_one_partition_of_crc16() -> None:
    p = partitioner("crc16", 64)
    assert p.partition_of_prefix(b"{u1}.") == p.partition_of(b"{u1}.anything")
    assert p.partition_of_prefix(b"u1.") is None


# --- names -------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "router_text", "expected"),
    [
        ("murmur2", "", "murmur2"),
        ("murmur2", "whole", "murmur2"),
        ("murmur2(whole)", "", "murmur2"),
        ("murmur2", "until:2F,1", "murmur2(until:2f)"),
        ("md5(until:2f,2)", "until:2F,2", "md5(until:2f,2)"),
        ("crc16", "tag", "crc16"),
        ("crc16", "whole", "crc16(whole)"),
        ("murmur2", "tag", "murmur2(tag)"),
        ("murmur2", "first:008", "murmur2(first:8)"),
    ],
)
def test_name_has_one_form(name: str, router_text: str, expected: str) -> None:
    assert canonical_name(name, router_text) == expected
    assert partitioner(expected, 4).name == expected


@pytest.mark.parametrize(
    "name",
    [
        *("murmur2(until:2f", "murmur2until:2f)", "murmur2()", "sha1(whole)", "murmur2(until)"),
        *("murmur2(until:/)", "murmur2(until:2f,0)", "murmur2(until:2f,17)", "murmur2(until:2f,)"),
        *("murmur2(first:0)", "murmur2(first:501)", "murmur2(first:-1)", "murmur2(h3:16)"),
        *("murmur2(h3:)", "murmur2(tag:1)", "murmur2(whole:)x)", "murmur2(nobody-knows:1)"),
        *("murmur2(until:2f)(tag)", f"murmur2({'x' * 200})", "murmur2(first:²)"),
    ],
)
def test_name_that_means_nothing_is_refused(name: str) -> None:
    with pytest.raises(ConfigurationError):
        partitioner(name, 8)


def test_two_routers_that_differ_are_refused() -> None:
    with pytest.raises(ConfigurationError, match=r"until:2f.*tag"):
        canonical_name("murmur2(until:2f)", "tag")


def test_crc16_without_its_tag_hashes_the_whole_key() -> None:
    whole, tagged = partitioner("crc16(whole)", 16_384), partitioner("crc16", 16_384)
    assert whole.partition_of(b"{a}b") != tagged.partition_of(b"{a}b") == tagged.partition_of(b"a")
    assert whole.partition_of(b"123456789") == tagged.partition_of(b"123456789") == 12_739
    assert tagged.routing_bytes(b"{a}b") == b"a"


# --- fingerprints ------------------------------------------------------------------------------

FINGERPRINTS = {
    "murmur2": "9efac2493d50e1a3",
    "md5": "bfbbcf079f49fbd7",
    "crc16": "ce305987b2754f65",
    "murmur2(until:2f)": "3a994bdc0db77925",
    "murmur2(tag)": "67c6011bae59abbc",
    "murmur2(first:8)": "38648687acf0f908",
    "murmur2(h3:3)": "f0a9e3028463c0c2",
}
"""They stand in configurations of clusters: they never change."""


@pytest.mark.parametrize(("name", "begin"), FINGERPRINTS.items())
def test_fingerprint_never_changes(name: str, begin: str) -> None:
    assert partitioner(name, 8).fingerprint.hex()[:16] == begin
    assert partitioner(name, 4).fingerprint == partitioner(name, 8).fingerprint


def test_fingerprints_of_routers_differ() -> None:
    texts = ["whole", "tag"]
    texts += [f"until:{delimiter:02x}" for delimiter in range(256)]
    texts += [f"until:2f,{n}" for n in range(2, 17)]
    texts += [f"first:{n}" for n in (*range(1, 40), *range(40, 500, 23), 499)]
    texts += [f"h3:{resolution}" for resolution in range(16)]
    answers = {
        text: tuple(map(router(text).routing_bytes, fixed_keys()))  # what fingerprints are made of
        for text in texts
    }
    assert len(set(answers.values())) == len(texts)
    assert len({partitioner(name, 8).fingerprint for name in FINGERPRINTS}) == len(FINGERPRINTS)


def test_partitioner_with_the_same_fingerprint_is_given() -> None:
    own = partitioner("md5(until:2f)", 8)
    cluster = config_of(8, partitioner=own.name, partitioner_fingerprint=own.fingerprint)
    assert partitioner_of(default_keyspace(cluster)).name == own.name
    assert partitioner_of(default_keyspace(config_of(8, partitioner="crc16"))).name == "crc16"


def test_partitioner_that_answers_otherwise_is_refused_with_both_names_and_fingerprints() -> None:
    cluster = config_of(8, partitioner="murmur2(tag)", partitioner_fingerprint=b"\xab" * 32)
    with pytest.raises(PartitionerMismatchError) as caught:
        partitioner_of(default_keyspace(cluster))
    own = partitioner("murmur2(tag)", 8)
    said = str(caught.value)
    assert said.count("murmur2(tag)") == 2
    assert "ab" * 32 in said
    assert own.fingerprint.hex() in said


# --- routers from elsewhere ----------------------------------------------------------------------


class LastRouter(KeyRouter):
    """The last n bytes."""

    def __init__(self, n: int) -> None:
        self.text = f"last:{n}"
        self.n = n

    def routing_bytes(self, key: bytes) -> bytes:
        return key[-self.n :]


class ContradictingRouter(LastRouter):
    def spans(self, data: Any, starts: Any, ends: Any) -> Any:
        return data, starts, ends


class HastyRouter(LastRouter):
    def of_prefix(self, prefix: bytes) -> bytes | None:
        return prefix[:1]


Install = Callable[[type[LastRouter]], None]


@pytest.fixture
def install(monkeypatch: pytest.MonkeyPatch) -> Install:
    """Installs a class as the router ``last``."""

    def installed(kind: type[LastRouter], copies: int = 1) -> None:
        def found(*, group: str, name: str) -> list[Any]:
            assert group == "koinon.routers"
            point = SimpleNamespace(load=lambda: lambda parameters: kind(int(parameters)))
            return [point] * copies if name == "last" else []

        monkeypatch.setattr(routers, "entry_points", found)
        router.cache_clear()
        sure_partitioner.cache_clear()

    return installed


def test_router_from_an_entry_point_routes_in_every_form(install: Install) -> None:
    install(LastRouter)
    p = sure_partitioner("murmur2(last:2)", 64, b"")
    keys = [b"%d-%02d" % (n, n % 7) for n in range(200)]
    expected = [partitioner("murmur2", 64).partition_of(key[-2:]) for key in keys]
    for found in every_form(p, keys):
        assert found.tolist() == expected
    assert p.partition_of_prefix(b"12") is None
    assert partitioner("murmur2(last:3)", 64).fingerprint != p.fingerprint


def test_router_of_another_version_is_refused(install: Install) -> None:
    install(LastRouter)
    recorded = partitioner("murmur2(last:2)", 64).fingerprint

    class NewerRouter(LastRouter):
        def routing_bytes(self, key: bytes) -> bytes:
            return key[-self.n :].lower()

    install(NewerRouter)
    with pytest.raises(PartitionerMismatchError, match=r"last:2.*last:2"):
        sure_partitioner("murmur2(last:2)", 64, recorded)


class SplitRouter(LastRouter):
    """Treats a group by itself that is in no fixed key."""

    examples = (b"shop7/1",)

    def routing_bytes(self, key: bytes) -> bytes:
        return key[: 5 + self.n] if key.startswith(b"shop7/") else key


def test_router_of_another_version_is_told_by_the_keys_that_it_names(install: Install) -> None:
    install(SplitRouter)
    recorded = partitioner("murmur2(last:1)", 64).fingerprint

    class NewerRouter(SplitRouter):
        def routing_bytes(self, key: bytes) -> bytes:
            return key[: 6 + self.n] if key.startswith(b"shop7/") else key

    install(NewerRouter)
    with pytest.raises(PartitionerMismatchError):
        sure_partitioner("murmur2(last:1)", 64, recorded)


@pytest.mark.parametrize("example", [b"", b"k" * 501, "text"])
def test_example_that_is_no_key_is_refused(install: Install, example: Any) -> None:
    install(type("Wrong", (SplitRouter,), {"examples": (example,)}))
    with pytest.raises(ConfigurationError, match="example that is no key"):
        router("last:1")


@pytest.mark.parametrize("kind", [ContradictingRouter, HastyRouter])
def test_router_whose_forms_contradict_each_other_is_refused(
    install: Install, kind: type[LastRouter]
) -> None:
    install(kind)
    with pytest.raises(ConfigurationError, match="contradicts itself"):
        sure_partitioner("murmur2(last:2)", 64, b"")


def test_router_that_calls_itself_otherwise_is_refused(install: Install) -> None:
    install(LastRouter)
    with pytest.raises(ConfigurationError, match="calls itself 'last:2'"):
        router("last:02")
