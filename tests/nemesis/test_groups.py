"""A group of keys is one register: what its keys show together is one value, or a violation."""

from __future__ import annotations

from pathlib import Path

from koinon.types import Entry
from tests.checkers.linearizability import check
from tests.nemesis.groups import HALF, MEMBERS, group_name, is_group, keys_of, register
from tests.nemesis.journal import Journal, merge, operations
from tests.nemesis.schedules import BEGINS_S, make_schedule


def entry(text: str, version: int) -> Entry:
    return Entry(b"key", text.encode() + b" ....", version, None)


def test_group_whose_keys_agree_holds_that_value_and_version() -> None:
    assert register([entry("w1/g0/7", 9)] * MEMBERS) == ("w1/g0/7", 9)
    assert register([None] * MEMBERS) == (None, 0)


def test_keys_of_a_group_have_its_tag_and_are_told_from_other_keys() -> None:
    group = group_name("s17", 2)
    assert is_group(group)
    assert not is_group("s17/key/2")
    assert all(key.startswith(b"{s17/group/2}/") for key in keys_of(group))
    assert len(set(keys_of(group))) == MEMBERS


def test_half_of_a_batch_is_a_violation_whatever_the_other_half_is(tmp_path: Path) -> None:
    old, new = entry("w1/g0/1", 5), entry("w2/g0/1", 6)
    seen: list[list[Entry | None]] = [[old, new], [None, new], [new, entry("w2/g0/1", 7)]]
    for number, found in enumerate(seen):
        journal = Journal(tmp_path / str(number))
        for text, version in (("w1/g0/1", 5), ("w2/g0/1", 6)):
            journal.invoke(0, "write", "{g}", text).ok(version=version)
        value, version = register(found)
        journal.invoke(1, "read", "{g}", None).ok(value=value, version=version)
        (violation,) = check(operations(merge([tmp_path / str(number)])))
        assert HALF in str(violation)


def test_dense_schedule_leaves_little_calm_between_faults() -> None:
    steps = make_schedule(3, ["kill"], 60.0, calm_s=(0.3, 1.0)).steps
    ends = [step.at_s + step.lasts_s for step in steps]
    gaps = [later.at_s - end for later, end in zip(steps[1:], ends, strict=False)]
    assert max(gaps) <= 1.01
    assert steps[0].at_s == BEGINS_S
    assert len(steps) > len(make_schedule(3, ["kill"], 60.0).steps)
