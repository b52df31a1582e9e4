"""Grants against a plain reading of their rule; tokens; what a state makes of them."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from koinon_proto.contract.access import (
    ROOT,
    Access,
    AccessState,
    Action,
    Effect,
    Grant,
    KeyPermissions,
    Permissions,
    Role,
    User,
    grants_counted,
    is_serial,
    is_token_id,
    make_token,
    parse_token,
    prefix_end,
    secret_hash,
    serial_text,
)
from koinon_proto.contract.keyspaces import DEFAULT_ID, KeyspaceId

ALLOW, DENY = Effect.ALLOW, Effect.DENY
READ, WRITE, SCAN = Action.READ, Action.WRITE, Action.SCAN


VIP = KeyspaceId(1)


def allow(*actions: Action, prefix: bytes = b"", keyspace_id: KeyspaceId | None = None) -> Grant:
    return Grant(effect=ALLOW, actions=actions, prefix=prefix, keyspace_id=keyspace_id)


def deny(*actions: Action, prefix: bytes = b"", keyspace_id: KeyspaceId | None = None) -> Grant:
    return Grant(effect=DENY, actions=actions, prefix=prefix, keyspace_id=keyspace_id)


# --- the rule, read plainly -----------------------------------------------------------------------


def plainly(grants: Iterable[Grant], action: Action, key: bytes) -> bool:
    holding = [g for g in grants if action in g.actions and key.startswith(g.prefix)]
    longest = max((len(g.prefix) for g in holding), default=0)
    effects = {g.effect for g in holding if len(g.prefix) == longest}
    return effects == {ALLOW}


def plainly_all_below(grants: Iterable[Grant], action: Action, prefix: bytes) -> bool:
    return plainly(grants, action, prefix) and not any(
        g.effect is DENY and action in g.actions and g.prefix.startswith(prefix) for g in grants
    )


# Few different bytes, so that prefixes meet; 0xff, after which there is no next one.
keys = st.lists(st.sampled_from([0, 97, 98, 254, 255]), max_size=5).map(bytes)
some_grants = st.lists(
    st.builds(
        Grant,
        effect=st.sampled_from(Effect),
        actions=st.lists(st.sampled_from([READ, WRITE, SCAN]), max_size=2).map(tuple),
        prefix=keys,
    ),
    max_size=12,
)


@given(roles=st.lists(some_grants, max_size=3), asked=st.lists(keys, max_size=20))
@example(roles=[[allow(READ, prefix=b"a"), deny(READ, prefix=b"a")]], asked=[b"a", b"ab"])
@example(roles=[[allow(READ, prefix=b"\xff\xff")]], asked=[b"\xff", b"\xff\xff", b"\xff\xff\xff"])
def test_permissions_say_what_a_plain_reading_of_the_rule_says(
    roles: list[list[Grant]], asked: list[bytes]
) -> None:
    grants = [grant for role in roles for grant in role]
    permissions = KeyPermissions(grants)
    for action in (READ, WRITE, SCAN, Action.LOAD):
        refused = [key for key in asked if not plainly(grants, action, key)]
        for _ in range(2):  # what was asked before is remembered
            assert permissions.first_refused(action, asked) == next(iter(refused), None)
        for key in asked:
            assert permissions.allows(action, key) == plainly(grants, action, key)
            assert permissions.allows_prefix(action, key) == plainly_all_below(grants, action, key)


@given(grants=some_grants, below=st.lists(keys, max_size=20), prefix=keys)
def test_prefix_that_is_allowed_has_no_key_that_is_not(
    grants: list[Grant], below: list[bytes], prefix: bytes
) -> None:
    permissions = KeyPermissions(grants)
    if permissions.allows_prefix(READ, prefix):
        assert permissions.first_refused(READ, [prefix + key for key in below]) is None
    if permissions.allows_all(READ):
        assert permissions.first_refused(READ, below) is None
        assert permissions.allows_prefix(READ, b"")
    if permissions.first_refused(READ, [prefix]) is None:
        assert permissions.allows_some(READ)


@given(grants=some_grants, below=st.lists(keys, min_size=1, max_size=20))
def test_range_that_is_allowed_has_no_key_that_is_not(
    grants: list[Grant], below: list[bytes]
) -> None:
    permissions = KeyPermissions(grants)
    first, last = min(below), max(below)
    if permissions.allows_range(READ, first, last):
        assert permissions.first_refused(READ, below) is None
    assert permissions.allows_range(READ, first, first) == permissions.allows(READ, first)


@given(prefix=keys, key=keys)
def test_end_of_a_prefix_is_the_least_key_above_it(prefix: bytes, key: bytes) -> None:
    end = prefix_end(prefix)
    inside = key >= prefix and (end is None or key < end)
    assert inside == key.startswith(prefix)


def test_all_and_none() -> None:
    for action in Action:
        assert Permissions.ALL.allows_some(action)
        assert Permissions.ALL.allows_on_cluster(action)
        assert not Permissions.NONE.allows_some(action)
        assert not Permissions.NONE.allows_on_cluster(action)
        for keyspace_id in (0, 7):
            everything = Permissions.ALL.in_keyspace(keyspace_id)
            assert everything.allows_all(action)
            assert everything.allows_prefix(action, b"")
            assert everything.first_refused(action, [b"a"]) is None
            nothing = Permissions.NONE.in_keyspace(keyspace_id)
            assert not nothing.allows_prefix(action, b"a")
            assert nothing.first_refused(action, [b"a"]) == b"a"
            assert nothing.first_refused(action, []) is None


some_grants_of_keyspaces = st.lists(
    st.builds(
        Grant,
        effect=st.sampled_from(Effect),
        actions=st.lists(st.sampled_from([READ, WRITE]), max_size=2, unique=True).map(tuple),
        prefix=keys,
        keyspace_id=st.sampled_from([None, DEFAULT_ID, VIP, KeyspaceId(2)]),
    ),
    max_size=12,
)


@given(grants=some_grants_of_keyspaces, asked=st.lists(keys, max_size=20))
@example(grants=[allow(READ), deny(READ, keyspace_id=VIP)], asked=[b"a"])
@example(grants=[deny(READ), allow(READ, keyspace_id=VIP)], asked=[b"a"])
@example(grants=[allow(READ, keyspace_id=DEFAULT_ID)], asked=[b"a"])
def test_in_a_keyspace_only_its_grants_and_those_of_every_keyspace_hold(
    grants: list[Grant], asked: list[bytes]
) -> None:
    permissions = Permissions(grants)
    some: set[Action] = set()
    for keyspace_id in (0, 1, 2, 3):
        holding = [g for g in grants if g.keyspace_id in (None, keyspace_id)]
        held = permissions.in_keyspace(keyspace_id)
        for action in (READ, WRITE):
            refused = [key for key in asked if not plainly(holding, action, key)]
            assert held.first_refused(action, asked) == next(iter(refused), None)
            some |= {action} if held.allows_some(action) else set()
    for action in (READ, WRITE):
        assert permissions.allows_some(action) == (action in some)


def test_grant_that_names_no_keyspace_counts_once_for_each_that_others_name() -> None:
    everywhere = [allow(READ, prefix=b"%d" % n) for n in range(3)]
    assert grants_counted(everywhere) == 3
    vip = [allow(READ, keyspace_id=VIP), deny(READ, prefix=b"a", keyspace_id=VIP)]
    assert grants_counted([*everywhere, *vip]) == 3 + 2 + 3
    assert grants_counted([*everywhere, *vip, allow(READ, keyspace_id=DEFAULT_ID)]) == 3 + 3 + 6


def test_actions_with_grants_of_their_own_are_kept_apart() -> None:
    permissions = KeyPermissions([allow(READ, SCAN), allow(WRITE, prefix=b"w"), deny(SCAN)])
    assert permissions.allows_all(READ)
    assert not permissions.allows_some(SCAN)
    assert permissions.allows_some(WRITE)
    assert not permissions.allows_all(WRITE)


def test_heads_that_are_remembered_are_bounded() -> None:
    permissions = KeyPermissions([allow(READ), deny(READ, prefix=b"12345678")])
    for i in range(10_000):
        assert permissions.first_refused(READ, [b"%08d" % (i + 20_000_000)]) is None
    assert len(permissions._reaches[READ]._heads) <= 1_024
    assert permissions.first_refused(READ, [b"123456789"]) == b"123456789"


@given(groups=st.lists(st.lists(keys, max_size=6), max_size=30), grants=some_grants)
def test_groups_of_keys_are_decided_as_each_key_whatever_was_asked_before(
    groups: list[list[bytes]], grants: list[Grant]
) -> None:
    permissions = KeyPermissions(grants)
    for group in groups:
        refused = [key for key in group if not plainly(grants, READ, key)]
        assert permissions.first_refused(READ, group) == next(iter(refused), None)


# --- tokens ---------------------------------------------------------------------------------------


def test_token_is_found_by_its_text_alone() -> None:
    token, text = make_token("app", created_s=100)
    assert parse_token(text) == (token.id, text.rpartition("_")[2])
    assert is_token_id(token.id)
    assert secret_hash(text.rpartition("_")[2]) == token.sha256
    assert text not in repr(token)
    assert token.sha256.hex() not in repr(token)
    assert make_token("app", created_s=100)[1] != text


@pytest.mark.parametrize(
    "text",
    ["", "koinon", "koinon__", "koinon_abc_def", "x" * 1000, "koinon_aaaaaaaaaa_" + "é" * 43],
)
def test_text_that_is_no_token_is_none(text: str) -> None:
    assert parse_token(text) is None
    assert Access().token_of(text, 0) is None


def state_of(**changes: object) -> tuple[AccessState, str]:
    token, text = make_token("app", created_s=100, expires_s=200)
    state = AccessState(
        version=7,
        roles=(Role(name="reader", grants=(allow(READ, prefix=b"a/"),)),),
        users=(User(name="app", roles=("reader",)), User(name="nobody")),
        tokens=(token,),
        revoked_serials=("1f",),
    )
    return replace(state, **changes), text  # type: ignore[arg-type]


def test_token_is_taken_until_it_expires() -> None:
    state, text = state_of()
    access = Access(state)
    assert access.version == 7
    assert getattr(access.token_of(text, 199.9), "user", None) == "app"
    assert access.token_of(text, 200) is None
    never = Access(replace(state, tokens=(replace(state.tokens[0], expires_s=0),)))
    assert getattr(never.token_of(text, 1e12), "user", None) == "app"


def test_token_with_another_secret_or_of_nobody_is_not_taken() -> None:
    state, text = state_of()
    other = text[:-1] + ("A" if text[-1] != "A" else "B")
    assert Access(state).token_of(other, 150) is None
    assert Access(replace(state, tokens=())).token_of(text, 150) is None
    assert Access(replace(state, users=())).token_of(text, 150) is None
    blocked = replace(state.users[0], blocked=True)
    assert Access(replace(state, users=(blocked,))).token_of(text, 150) is None


def test_token_never_names_root() -> None:
    token, text = make_token(ROOT, created_s=100)
    assert Access(AccessState(version=1, tokens=(token,))).token_of(text, 150) is None


# --- users ----------------------------------------------------------------------------------------


def test_user_has_what_its_roles_give() -> None:
    access = Access(state_of()[0])
    reader = access.permissions_of("app")
    assert reader.in_keyspace(0).first_refused(READ, [b"a/1"]) is None
    assert reader.in_keyspace(0).first_refused(READ, [b"a/1", b"b"]) == b"b"
    assert access.permissions_of("app") is reader
    assert access.permissions_of("nobody").in_keyspace(0).first_refused(READ, [b"a/1"]) == b"a/1"


def test_user_that_is_not_let_in_has_nothing_and_is_told_why() -> None:
    state, _ = state_of(users=(User(name="app", roles=("reader",), blocked=True),))
    assert Access(state).permissions_of("app") is Permissions.NONE
    assert "blocked" in Access(state).fault_of("app")
    assert Access(state).permissions_of("ghost") is Permissions.NONE
    assert "'ghost'" in Access(state).fault_of("ghost")


def test_certificates_issued_before_a_time_are_refused() -> None:
    state, _ = state_of(users=(User(name="app", roles=("reader",), certificates_from_s=1000),))
    access = Access(state)
    assert access.permissions_of("app", 999) is Permissions.NONE
    assert "certificate" in access.fault_of("app", 999)
    assert access.permissions_of("app", 1000).allows_some(READ)
    assert access.permissions_of("app", 0).allows_some(READ)  # with a token


@pytest.mark.parametrize(
    "state", [AccessState(), AccessState(users=(User(name=ROOT, blocked=True),))]
)
def test_root_may_do_everything_whatever_the_state_says(state: AccessState) -> None:
    assert Access(state).permissions_of(ROOT, 5) is Permissions.ALL
    assert Access(state).fault_of(ROOT, 5) == ""


def test_access_without_a_state_lets_no_user_in() -> None:
    assert Access().permissions_of("app") is Permissions.NONE
    assert Access().fault_of("app")


def test_serial_number_is_found_in_any_length() -> None:
    access = Access(state_of()[0])
    assert access.is_revoked(0x1F)
    assert not access.is_revoked(0x1F0)
    assert is_serial(serial_text((1 << 160) - 1))
    for wrong in ("", "0", "01", "1F", "g", "f" * 41):
        assert not is_serial(wrong)


def test_permissions_of_roles_that_have_not_changed_are_taken_over() -> None:
    state, _ = state_of()
    first = Access(state)
    made = first.permissions_of("app")
    assert Access(replace(state, version=8), first).permissions_of("app") is made
    other = replace(state, roles=(Role(name="reader", grants=(allow(WRITE),)),))
    assert Access(other, first).permissions_of("app").in_keyspace(0).allows_all(WRITE)
    assert not Access(other, first).permissions_of("app").allows_some(READ)
    gone = Access(replace(state, roles=()), first)
    assert not gone.permissions_of("app").allows_some(READ)
