"""Users, roles and tokens in the replicated state: what is refused, what changes, what is kept."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from koinon_coordinator.core.cluster import access_rules as rules
from koinon_coordinator.core.cluster.commands import (
    AccessChanged,
    AccessCommand,
    AddToken,
    DropRole,
    DropToken,
    DropUser,
    PutRole,
    PutUser,
    Reason,
    Rejected,
    RestoreCertificate,
    RevokeCertificate,
)
from koinon_coordinator.core.cluster.state import ClusterState
from koinon_coordinator.core.decide.access_requests import check_change, refusal
from koinon_coordinator.wire.state_codec import (
    command_from_bytes,
    command_to_bytes,
    image_from_bytes,
    image_to_bytes,
)
from koinon_proto.contract import access
from koinon_proto.contract.access import (
    AccessState,
    Action,
    Effect,
    Grant,
    Role,
    Token,
    User,
    make_token,
)
from koinon_proto.contract.errors import (
    ConditionFailedError,
    InvalidArgumentError,
    UnavailableError,
    UnknownKeyspaceError,
)
from koinon_proto.contract.keyspaces import DEFAULT_ID, KeyspaceId
from tests.coordinator.kit.support import bootstrapped

from .test_keyspaces import created, dropped, forgotten, wanted

READER = Role(
    name="reader", grants=(Grant(effect=Effect.ALLOW, actions=(Action.READ,), prefix=b"a"),)
)
APP = User(name="app", roles=("reader",))
TOKEN, TEXT = make_token("app", created_s=100)


def some_state() -> ClusterState:
    state = bootstrapped([(1,)], nodes=1)
    for command in (PutRole(role=READER), PutUser(user=APP), AddToken(token=TOKEN)):
        assert isinstance(state.apply(command), AccessChanged)
    return state


def refused(state: ClusterState, command: AccessCommand) -> InvalidArgumentError:
    """The leader refuses the command by name, and every member refuses it too."""
    with pytest.raises(InvalidArgumentError) as error:
        check_change(state.access.state, command, state.keyspaces)
    before = state.image()
    assert state.apply(command) == Rejected(reason=Reason.BAD_ACCESS)
    assert state.image() == before
    return error.value


def role_of(name: str, *prefixes: bytes) -> Role:
    grants = (Grant(effect=Effect.ALLOW, actions=(Action.READ,), prefix=p) for p in prefixes)
    return Role(name=name, grants=tuple(grants))


def in_keyspace(keyspace_id: KeyspaceId | None, *actions: Action) -> Grant:
    return Grant(effect=Effect.ALLOW, actions=actions or (Action.READ,), keyspace_id=keyspace_id)


def with_vip(state: ClusterState) -> KeyspaceId:
    """Create a keyspace of this name; return its id."""
    return created(state, wanted("vip", replication_factor=1)).keyspace_id


def test_changes_rise_the_version_and_nothing_new_does_not() -> None:
    state = some_state()
    table_version = state.table_version
    assert state.access.version == 3
    for command in (PutRole(role=READER), PutUser(user=APP), AddToken(token=TOKEN)):
        assert state.apply(command) == AccessChanged(version=3)
    assert state.apply(RestoreCertificate(serial="1f")) == AccessChanged(version=3)
    assert state.apply(RevokeCertificate(serial="1f")) == AccessChanged(version=4)
    assert state.access.is_revoked(0x1F)
    assert state.apply(RestoreCertificate(serial="1f")) == AccessChanged(version=5)
    assert not state.access.is_revoked(0x1F)
    assert state.table_version == table_version


def test_access_is_what_the_commands_say() -> None:
    state = some_state()
    assert getattr(state.access.token_of(TEXT, 150), "user", None) == "app"
    assert state.access.permissions_of("app").in_keyspace(DEFAULT_ID).allows(Action.READ, b"a1")
    state.apply(PutUser(user=replace(APP, blocked=True)))
    assert state.access.token_of(TEXT, 150) is None
    state.apply(PutUser(user=APP))
    state.apply(PutRole(role=role_of("reader", b"b")))
    assert not state.access.permissions_of("app").in_keyspace(DEFAULT_ID).allows(Action.READ, b"a1")
    state.apply(DropToken(token_id=TOKEN.id))
    assert state.access.token_of(TEXT, 150) is None


def test_user_is_dropped_with_its_tokens() -> None:
    state = some_state()
    state.apply(PutUser(user=User(name="other")))
    other, _ = make_token("other", created_s=1)
    state.apply(AddToken(token=other))
    state.apply(DropUser(name="app"))
    assert [user.name for user in state.access.state.users] == ["other"]
    assert state.access.state.tokens == (other,)


def test_role_that_users_have_is_not_dropped() -> None:
    state = some_state()
    error = refused(state, DropRole(name="reader"))
    assert "belongs to app" in str(error)
    state.apply(PutUser(user=User(name="app")))
    assert isinstance(state.apply(DropRole(name="reader")), AccessChanged)
    assert state.access.state.roles == ()


@pytest.mark.parametrize(
    ("command", "field", "says"),
    [
        (PutRole(role=Role(name="no name")), "name", "letters, digits"),
        (PutRole(role=Role(name="")), "name", "letters, digits"),
        (PutRole(role=Role(name="x" * 129)), "name", "letters, digits"),
        (
            PutRole(role=Role(name="r", grants=(Grant(effect=Effect.ALLOW, actions=()),))),
            "actions",
            "at least one",
        ),
        (
            PutRole(
                role=Role(
                    name="r",
                    grants=(
                        Grant(effect=Effect.ALLOW, actions=(Action.READ, Action.VIEW), prefix=b"a"),
                    ),
                )
            ),
            "prefix",
            "view concerns no keys",
        ),
        (PutRole(role=role_of("r", b"x" * 501)), "prefix", "longer than any key"),
        (
            PutRole(role=Role(name="r", grants=(in_keyspace(DEFAULT_ID, Action.VIEW),))),
            "keyspace_id",
            "view concerns no keyspace",
        ),
        (DropRole(name="readr"), "role", "no role 'readr'; there are reader"),
        (PutUser(user=User(name="root")), "name", "by its certificate"),
        (PutUser(user=User(name="a b")), "name", "letters"),
        (PutUser(user=User(name="u", roles=("writer",))), "role", "no role 'writer'"),
        (PutUser(user=User(name="u", roles=("reader", "reader"))), "roles", "twice"),
        (PutUser(user=replace(APP, certificates_from_s=1 << 41)), "certificates_from_s", "time"),
        (DropUser(name="ap"), "user", "no user 'ap'; there are app"),
        (AddToken(token=replace(TOKEN, user="ap")), "user", "no user 'ap'"),
        (AddToken(token=replace(TOKEN, user="root")), "user", "certificate"),
        (AddToken(token=replace(TOKEN, id="short")), "id", "10 of a-z"),
        (AddToken(token=replace(TOKEN, sha256=b"")), "sha256", "SHA-256"),
        (AddToken(token=replace(TOKEN, expires_s=1)), "id", "another token"),
        (AddToken(token=replace(TOKEN, description="a\x1bb")), "description", "printable"),
        (DropToken(token_id="aaaaaaaaaa"), "token", "no token"),
        (RevokeCertificate(serial="0x1"), "serial", "hexadecimal"),
        (RestoreCertificate(serial=""), "serial", "hexadecimal"),
    ],
)
def test_change_that_cannot_be_is_refused_by_name(
    command: AccessCommand, field: str, says: str
) -> None:
    error = refused(some_state(), command)
    assert error.field == field
    assert says in str(error)


def test_change_at_another_version_is_refused_as_such() -> None:
    state = some_state()
    stale = PutRole(role=role_of("r"), expected_version=2)
    with pytest.raises(ConditionFailedError, match=r"expected version 2.* 3"):
        check_change(state.access.state, stale, state.keyspaces)
    assert state.apply(stale) == Rejected(reason=Reason.ACCESS_CHANGED)
    assert state.apply(replace(stale, expected_version=3)) == AccessChanged(version=4)
    assert isinstance(
        refusal(state.access.state, stale, state.keyspaces, Reason.ACCESS_CHANGED),
        ConditionFailedError,
    )
    fits = replace(stale, expected_version=4)
    assert isinstance(
        refusal(state.access.state, fits, state.keyspaces, Reason.BAD_ACCESS), UnavailableError
    )


# --- keyspaces ------------------------------------------------------------------------------------


def reads_in(state: ClusterState, keyspace_id: KeyspaceId) -> bool:
    return state.access.permissions_of("app").in_keyspace(keyspace_id).allows(Action.READ, b"z")


def test_grant_in_a_keyspace_ends_with_it_and_is_not_anothers_of_the_same_name() -> None:
    state = some_state()
    first = with_vip(state)
    role = Role(name="reader", grants=(*READER.grants, in_keyspace(first)))
    assert isinstance(state.apply(PutRole(role=role)), AccessChanged)
    assert (reads_in(state, first), reads_in(state, DEFAULT_ID)) == (True, False)
    forgotten(state, dropped(state, "vip"))
    second = with_vip(state)
    assert second != first
    assert not reads_in(state, second)
    more = Role(name="reader", grants=(*role.grants, in_keyspace(second)))  # the first one stays
    assert isinstance(state.apply(PutRole(role=more)), AccessChanged)
    assert reads_in(state, second)
    assert isinstance(state.apply(PutRole(role=READER)), AccessChanged)
    assert not reads_in(state, second)


@pytest.mark.parametrize("is_dropped", [False, True])
def test_grant_in_a_keyspace_that_is_not_there_is_refused(is_dropped: bool) -> None:
    state, keyspace_id = some_state(), KeyspaceId(1)
    if is_dropped:
        keyspace_id = with_vip(state)
        dropped(state, "vip")
    command = PutRole(role=Role(name="reader", grants=(in_keyspace(keyspace_id),)))
    with pytest.raises(UnknownKeyspaceError):
        check_change(state.access.state, command, state.keyspaces)
    before = state.image()
    assert state.apply(command) == Rejected(reason=Reason.KEYSPACE_UNKNOWN)
    assert state.image() == before


# --- bounds ---------------------------------------------------------------------------------------


def test_user_has_a_bounded_number_of_grants(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rules, "GRANTS_MAX", 3)
    state = some_state()
    state.apply(PutRole(role=role_of("two", b"a", b"b")))
    state.apply(PutUser(user=User(name="app", roles=("reader", "two"))))
    error = refused(state, PutRole(role=role_of("two", b"a", b"b", b"c")))
    assert "all roles of user app" in str(error)
    assert (error.limit, error.actual) == (3, 4)
    assert refused(state, PutRole(role=role_of("r", *[b"%d" % i for i in range(4)]))).actual == 4
    state.apply(PutRole(role=role_of("three", b"a", b"b", b"c")))
    assert refused(state, PutUser(user=User(name="app", roles=("two", "three")))).actual == 5


@pytest.mark.parametrize(
    ("name", "command"),
    [
        ("ROLES_MAX", PutRole(role=Role(name="r"))),
        ("USERS_MAX", PutUser(user=User(name="u"))),
        ("TOKENS_MAX", AddToken(token=replace(TOKEN, id="aaaaaaaaaa"))),
        ("GRANTS_ALL_MAX", PutRole(role=role_of("r", b""))),
        ("STATE_BYTES_MAX", PutRole(role=role_of("r", b""))),
        ("USER_ROLES_MAX", PutUser(user=User(name="app", roles=("reader",)))),
    ],
)
def test_everything_is_bounded(
    name: str, command: AccessCommand, monkeypatch: pytest.MonkeyPatch
) -> None:
    state = some_state()
    monkeypatch.setattr(rules, name, 0 if name == "USER_ROLES_MAX" else 1)
    assert "limit" in str(refused(state, command))


def test_revocations_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rules, "REVOKED_MAX", 1)
    state = some_state()
    state.apply(RevokeCertificate(serial="1f"))
    refused(state, RevokeCertificate(serial="2f"))
    assert isinstance(state.apply(RevokeCertificate(serial="1f")), AccessChanged)


def test_greatest_state_has_its_bytes_counted() -> None:
    state = AccessState(
        version=1,
        roles=(
            Role(name="k", grants=(in_keyspace(KeyspaceId((1 << 32) - 1)),) * 500),
            *(role_of(f"r{i}", *[b"%05d" % n for n in range(50)]) for i in range(20)),
        ),
        users=(User(name="é" * 10, roles=("r1", "r2")),),
        tokens=tuple(replace(TOKEN, description="é" * 200) for _ in range(10)),
        revoked_serials=("f" * 40,) * 10,
    )
    image = replace(some_state().image(), access=state)
    without = replace(image, access=access.NO_ACCESS_STATE)
    assert len(image_to_bytes(image)) - len(image_to_bytes(without)) <= state.bytes + 100


# --- any sequence ---------------------------------------------------------------------------------

names = st.sampled_from(["a", "b", "c"])
versions = st.none() | st.integers(0, 3)
commands: st.SearchStrategy[AccessCommand] = st.one_of(
    st.builds(
        PutRole,
        role=st.builds(Role, name=names, grants=st.just(READER.grants)),
        expected_version=versions,
    ),
    st.builds(DropRole, name=names),
    st.builds(
        PutUser,
        user=st.builds(User, name=names, roles=st.lists(names, max_size=2, unique=True).map(tuple)),
    ),
    st.builds(DropUser, name=names),
    st.builds(
        AddToken,
        token=st.builds(
            Token,
            id=st.sampled_from(["a" * 10, "b" * 10]),
            user=names,
            sha256=st.just(bytes(32)),
            created_s=st.just(1),
        ),
    ),
    st.builds(DropToken, token_id=st.sampled_from(["a" * 10, "b" * 10])),
    st.builds(RevokeCertificate, serial=names),
    st.builds(RestoreCertificate, serial=names),
)


@given(st.lists(commands, max_size=30))
def test_any_changes_leave_only_names_that_there_are(given_commands: list[AccessCommand]) -> None:
    state, copy = bootstrapped([(1,)], nodes=1), bootstrapped([(1,)], nodes=1)
    for command in given_commands:
        before = state.access.state
        result = state.apply(command)
        copy = ClusterState(image_from_bytes(image_to_bytes(copy.image())))
        assert copy.apply(command_from_bytes(command_to_bytes(command))) == result
        after = state.access.state
        assert (after.version == before.version) == (after == before)
        assert isinstance(result, Rejected) <= (after == before)
        users = [user.name for user in after.users]
        assert users == sorted(set(users))
        assert {token.user for token in after.tokens} <= set(users)
        roles = {role.name for role in after.roles}
        assert {role for user in after.users for role in user.roles} <= roles
    assert copy.image() == state.image()
