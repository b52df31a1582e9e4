"""admin users, roles, tokens and certificates: commands that change permissions."""

from __future__ import annotations

import os
import re
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from operator import itemgetter
from pathlib import Path
from typing import Annotated, Any

import typer

from koinon.cli.console.command import Session, Yes, command, default_command, duration_ms
from koinon.cli.console.help import Group
from koinon.cli.console.reply import Cell, Column, Reply, Styled, Table
from koinon.operate.admin import Admin
from koinon.operate.cluster_status import table_of
from koinon.operate.json_form import HIDDEN, IF_KNOWN, json_of
from koinon.operate.views import view
from koinon.operate.wording import count
from koinon_proto.contract.access import (
    CLUSTER_ACTIONS,
    Action,
    Effect,
    Grant,
    Role,
    Token,
    User,
    make_token,
    serial_text,
)
from koinon_proto.contract.errors import InvalidArgumentError
from koinon_proto.contract.keyspaces import KeyspaceId, Keyspaces
from koinon_proto.process.printable import printable_bytes
from koinon_proto.process.private_files import opener

users_app = typer.Typer(cls=Group, help="Who is let in, and the roles that each has.")
roles_app = typer.Typer(cls=Group, help="What may be done: grants on keys and on the cluster.")
tokens_app = typer.Typer(cls=Group, help="Secrets by which programs say whose they are.")
certificates_app = typer.Typer(cls=Group, help="Certificates that are refused.")

ACTIONS = {action.name.lower(): action for action in Action}
_NAMES = ", ".join(ACTIONS)

Name = Annotated[str, typer.Argument(metavar="NAME")]
_BY_ID = re.compile(r"id:(\d{1,9})")  # the prefix of an id: a keyspace's name has no colon
_ROLE_HELP = "May be given several times."
Roles = Annotated[list[str] | None, typer.Option("--role", metavar="ROLE", help=_ROLE_HELP)]


@dataclass(frozen=True, kw_only=True)
class GrantOptions:
    """The options that describe a grant."""

    allow: Annotated[
        str, typer.Option("--allow", metavar="ACTION,…", help=f"What is allowed: {_NAMES}.")
    ] = ""
    deny: Annotated[str, typer.Option("--deny", metavar="ACTION,…", help="What is denied.")] = ""
    prefix: Annotated[
        str, typer.Option("--prefix", help="Of the keys that are meant; by default all keys.")
    ] = ""
    keyspace: Annotated[
        str,
        typer.Option(
            "--keyspace",
            metavar="NAME",
            help="In which the grant holds; by default in every one, later ones included. One that "
            "was dropped: its id, such as id:7.",
        ),
    ] = ""

    def grants(self, admin: Admin) -> list[Grant]:
        """Return the grants that the options describe; grants on the cluster have no prefix."""
        keyspace_id = _keyspace_id(admin, self.keyspace)
        found = []
        for text, option, effect in (
            (self.allow, "--allow", Effect.ALLOW),
            (self.deny, "--deny", Effect.DENY),
        ):
            actions = _actions(text, option)
            on_cluster = tuple(action for action in actions if action in CLUSTER_ACTIONS)
            on_keys = tuple(action for action in actions if action not in CLUSTER_ACTIONS)
            prefix = os.fsencode(self.prefix)
            if on_keys:
                found.append(
                    Grant(effect=effect, actions=on_keys, prefix=prefix, keyspace_id=keyspace_id)
                )
            if on_cluster and keyspace_id is not None:
                name = on_cluster[0].name.lower()
                raise InvalidArgumentError(
                    field="--keyspace", reason=f"{name} concerns no keyspace: grant it without one"
                )
            if on_cluster:
                found.append(Grant(effect=effect, actions=on_cluster))
        return found


def _actions(text: str, option: str) -> tuple[Action, ...]:
    names = [name.strip().lower() for name in text.split(",") if name.strip()]
    unknown = [name for name in names if name not in ACTIONS]
    if unknown:
        raise InvalidArgumentError(
            field=option, reason=f"{unknown[0]!r} is no action: there are {_NAMES}"
        )
    return tuple(sorted({ACTIONS[name] for name in names}))


def _keyspace_id(admin: Admin, keyspace: str) -> KeyspaceId | None:
    """Return the id of the keyspace with this name or ``id:NUMBER``; None for "", which means every
    keyspace.

    Raises:
        UnknownKeyspaceError: there is no such keyspace.
    """
    if not keyspace:
        return None
    if by_id := _BY_ID.fullmatch(keyspace):
        return KeyspaceId(int(by_id[1]))
    return table_of(admin.status()).keyspaces.named(keyspace).keyspace_id


def _keyspaces(admin: Admin, roles: Sequence[Role]) -> Keyspaces | None:
    """Return the keyspaces if a grant of the roles names one, else None."""
    if all(grant.keyspace_id is None for role in roles for grant in role.grants):
        return None
    return table_of(admin.status()).keyspaces


def _changed(admin: Admin, answer: Any, text: str) -> Reply:
    """Return the reply to a change: the text, and a note about nodes that have not confirmed it."""
    behind = admin.access.behind
    if behind.node_ids:
        answer = {**json_of(answer), "nodes_behind": list(behind.node_ids)}
    return Reply(answer, text, notes=[str(behind)] if behind.node_ids else [])


def _listing(answer: Any, table: Table, noun: str, example: str) -> Reply:
    if table.rows:
        return Reply(answer, [table])
    return Reply(answer, f"There is no {noun} yet. For example: koinon admin {example}")


# --- users ---------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class UserAnswer:
    """A user; certificates issued before ``certificates_from_s`` are refused."""

    user: str
    roles: list[str]
    blocked: bool = False
    certificates_from_s: int = 0
    tokens: int = field(default=0, metadata=HIDDEN)


def _user(user: User, tokens: Sequence[Token] = ()) -> UserAnswer:
    return UserAnswer(
        user=user.name,
        roles=list(user.roles),
        blocked=user.blocked,
        certificates_from_s=user.certificates_from_s,
        tokens=sum(token.user == user.name for token in tokens),
    )


USERS = (
    Column("USER", "user"),
    Column("ROLES", lambda user: ", ".join(user.roles) or Styled("none", "yellow")),
    Column(">TOKENS", "tokens"),
    Column("STATE", lambda user: Styled("blocked", "red") if user.blocked else None),
)


@default_command(users_app)
def users(session: Session) -> Reply:
    """List users, their roles and tokens. The user root may do everything and is not listed."""
    with session.admin() as admin:
        state = admin.access.state()
    found = [_user(user, state.tokens) for user in state.users]
    return _listing({"users": found}, Table(USERS, found), "user", "users create NAME --role ROLE")


@command(users_app, "create", examples=["admin users create etl --role loader"])
def create_user(session: Session, name: Name, *, role: Roles = None) -> Reply:
    """Create a user. Without a role it may do nothing.

    It logs in with a certificate (koinon certs user) or with a token (koinon admin tokens create).
    """
    roles = sorted(set(role or ()))
    with session.admin() as admin:
        if any(user.name == name for user in admin.access.state().users):
            raise InvalidArgumentError(
                field="NAME", reason=f"user {name} is there: 'koinon admin users grant' gives roles"
            )
        admin.access.put_user(User(name=name, roles=tuple(roles)))
        return _changed(admin, {"user": name, "roles": roles}, f"User {name} is known.")


@command(users_app, "grant", examples=["admin users grant etl --role reader"])
def grant_roles(session: Session, name: Name, *, role: Roles = None) -> Reply:
    """Give a user roles in addition to its present ones."""
    return _alter_roles(session, name, role, lambda held, given: held | given)


@command(users_app, "revoke", examples=["admin users revoke etl --role reader"])
def take_roles(session: Session, name: Name, *, role: Roles = None) -> Reply:
    """Take roles from a user."""
    return _alter_roles(session, name, role, lambda held, taken: held - taken)


@command(users_app, examples=["admin users block etl"])
def block(session: Session, name: Name) -> Reply:
    """Block a user: its tokens and certificates are refused."""
    return _alter(session, name, lambda user: replace(user, blocked=True), "is blocked")


@command(users_app, examples=["admin users unblock etl"])
def unblock(session: Session, name: Name) -> Reply:
    """Unblock a user."""
    return _alter(session, name, lambda user: replace(user, blocked=False), "is let in again")


@command(users_app, examples=["admin users expire-certificates etl"])
def expire_certificates(session: Session, name: Name) -> Reply:
    """Refuse all certificates of a user that were issued before now; then issue a new one."""
    from koinon.certs.authority import CLOCK_SKEW  # with cryptography, which only this one needs

    # the start of validity of a certificate issued now
    now = int(time.time()) - int(CLOCK_SKEW.total_seconds())
    return _alter(
        session,
        name,
        lambda user: replace(user, certificates_from_s=now),
        "comes in by certificates that are issued from now on",
    )


@command(users_app, "drop", examples=["admin users drop etl"])
def drop_user(session: Session, name: Name, *, yes: Yes = False) -> Reply:
    """Delete a user and its tokens."""
    session.ask(f"Drop user {name} and its tokens?", yes=yes)
    with session.admin() as admin:
        admin.access.drop_user(name)
        return _changed(admin, {"dropped": name}, f"User {name} is not known any more.")


def _alter_roles(
    session: Session,
    name: str,
    roles: list[str] | None,
    combine: Callable[[set[str], set[str]], set[str]],
) -> Reply:
    if not roles:
        raise InvalidArgumentError(field="--role", reason="name at least one")

    def change(user: User) -> User:
        return replace(user, roles=tuple(sorted(combine(set(user.roles), set(roles)))))

    return _alter(session, name, change, "is altered")


def _alter(session: Session, name: str, change: Callable[[User], User], what: str) -> Reply:
    with session.admin() as admin:
        user = admin.access.alter_user(name, change)
        listed = ", ".join(user.roles) or "none"
        return _changed(admin, _user(user), f"User {name} {what}. Roles: {listed}.")


# --- roles ---------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class GrantAnswer:
    """A grant. ``keyspace`` and ``keyspace_id`` None: it applies in every keyspace; only
    ``keyspace`` None: that keyspace was dropped.
    """

    effect: Effect
    actions: tuple[Action, ...]
    prefix: bytes
    keyspace: str | None
    keyspace_id: int | None


@dataclass(frozen=True, kw_only=True)
class RoleAnswer:
    """A role and its grants."""

    role: str
    grants: list[GrantAnswer]
    users: int = field(default=0, metadata=HIDDEN)


def _role(role: Role, keyspaces: Keyspaces | None, users: Sequence[User] = ()) -> RoleAnswer:
    def name(keyspace_id: KeyspaceId | None) -> str | None:
        found = keyspaces.by_id(keyspace_id) if keyspaces and keyspace_id is not None else None
        return found.name if found is not None and not found.is_dropping else None

    return RoleAnswer(
        role=role.name,
        grants=[
            GrantAnswer(
                effect=grant.effect,
                actions=grant.actions,
                prefix=grant.prefix,
                keyspace=name(grant.keyspace_id),
                keyspace_id=grant.keyspace_id,
            )
            for grant in role.grants
        ],
        users=sum(role.name in user.roles for user in users),
    )


def _grant_cells(grant: GrantAnswer | None) -> tuple[Cell, ...]:
    """Return the cells of a grant in the list of roles: effect, actions, keyspace, keys."""
    if grant is None:
        return None, Styled("none", "dim"), None, None
    effect = Styled("deny", "red") if grant.effect is Effect.DENY else "allow"
    where: tuple[Cell, Cell] = (Styled("-", "dim"), Styled("-", "dim"))
    if not set(grant.actions) <= set(CLUSTER_ACTIONS):
        keyspace: Cell = grant.keyspace or Styled(f"id:{grant.keyspace_id} (dropped)", "yellow")
        where = (
            Styled("every", "dim") if grant.keyspace_id is None else keyspace,
            printable_bytes(grant.prefix) if grant.prefix else Styled("all", "dim"),
        )
    return effect, ", ".join(json_of(grant.actions)), *where


ROLE_COLUMNS = ("ROLE", "", "ACTIONS", "KEYSPACE", "KEYS THAT BEGIN WITH", ">USERS")
ROLES = [Column(name, itemgetter(at)) for at, name in enumerate(ROLE_COLUMNS)]


def _rows(roles: Sequence[RoleAnswer]) -> Iterator[tuple[Cell, ...]]:
    for role in roles:
        grants: list[GrantAnswer | None] = [*role.grants] or [None]
        for at, grant in enumerate(grants):
            first = (None, None) if at else (role.role, role.users)
            yield first[0], *_grant_cells(grant), first[1]


@default_command(roles_app)
def roles(session: Session) -> Reply:
    """List roles and their grants."""
    with session.admin() as admin:
        state = admin.access.state()
        keyspaces = _keyspaces(admin, state.roles)
    found = [_role(role, keyspaces, state.users) for role in state.roles]
    rows = Table(ROLES, list(_rows(found)))
    return _listing({"roles": found}, rows, "role", "roles create NAME --allow read,write")


@command(
    roles_app,
    "create",
    examples=["admin roles create loader --allow load,scan --prefix sales:"],
)
def create_role(session: Session, name: Name, *, options: GrantOptions) -> Reply:
    """Create a role, with a first grant if one is given."""
    with session.admin() as admin:
        role = Role(name=name, grants=tuple(options.grants(admin)))
        if any(other.name == name for other in admin.access.state().roles):
            raise InvalidArgumentError(
                field="NAME", reason=f"role {name} is there: 'koinon admin roles grant' adds to it"
            )
        admin.access.put_role(role)
        answer = _role(role, _keyspaces(admin, [role]))
        return _changed(admin, answer, f"Role {name} is known.")


@command(
    roles_app, examples=["admin roles grant loader --allow read --prefix sales: --keyspace vip"]
)
def grant(session: Session, name: Name, *, options: GrantOptions) -> Reply:
    """Add a grant to a role. The longest matching prefix decides; of equal prefixes a denial.

    With --keyspace the grant applies in that keyspace alone. It ends when the keyspace is dropped,
    and a new keyspace of the same name does not have it.
    """
    with session.admin() as admin:
        added = options.grants(admin)
        if not added:
            raise InvalidArgumentError(field="--allow", reason="give --allow or --deny")
        role = admin.access.alter_role(
            name, lambda grants: [*grants, *(one for one in added if one not in grants)]
        )
        return _granted_now(admin, role)


@command(roles_app, examples=["admin roles revoke loader --deny scan --prefix sales:secret:"])
def revoke(session: Session, name: Name, *, options: GrantOptions) -> Reply:
    """Remove a grant from a role: describe it as 'koinon admin roles' shows it."""
    with session.admin() as admin:
        gone = options.grants(admin)

        def without(grants: tuple[Grant, ...]) -> Sequence[Grant]:
            missing = [one for one in gone if one not in grants]
            if missing or not gone:
                raise InvalidArgumentError(
                    field="--allow",
                    reason=f"role {name} has no such grant: 'koinon admin roles' lists those it "
                    "has",
                )
            return [one for one in grants if one not in gone]

        return _granted_now(admin, admin.access.alter_role(name, without))


@command(roles_app, "drop", examples=["admin roles drop loader"])
def drop_role(session: Session, name: Name, *, yes: Yes = False) -> Reply:
    """Delete a role that no user has."""
    session.ask(f"Drop role {name}?", yes=yes)
    with session.admin() as admin:
        admin.access.drop_role(name)
        return _changed(admin, {"dropped": name}, f"Role {name} is not known any more.")


def _granted_now(admin: Admin, role: Role) -> Reply:
    answer = _role(role, _keyspaces(admin, [role]))
    return _changed(admin, answer, f"Role {role.name} has {count(len(role.grants), 'grant')}.")


# --- tokens --------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class TokenAnswer:
    """A token, without its secret; ``expires_s`` 0: never."""

    id: str
    user: str
    created_s: int
    expires_s: int
    description: str

    @property
    def is_over(self) -> bool:
        return 0 < self.expires_s <= time.time()


@dataclass(frozen=True, kw_only=True)
class TokenMade:
    """A new token: its secret, or the file with the secret."""

    id: str
    user: str
    expires_s: int
    file: str | None = field(default=None, metadata=IF_KNOWN)
    token: str | None = field(default=None, metadata=IF_KNOWN)


def _expires(token: TokenAnswer) -> Cell:
    if not token.expires_s:
        return "never"
    return Styled(_day(token.expires_s), "red" if token.is_over else "")


TOKENS = (
    Column("TOKEN", "id"),
    Column("USER", "user"),
    Column("CREATED", lambda token: _day(token.created_s)),
    Column("EXPIRES", _expires),
    Column("WHAT", "description"),
)


@default_command(tokens_app)
def tokens(session: Session) -> Reply:
    """List tokens without their secrets, which only their holders know."""
    with session.admin() as admin:
        state = admin.access.state()
    found = [view(TokenAnswer, token) for token in state.tokens]
    shown = Table(TOKENS, found)
    return _listing({"tokens": found}, shown, "token", "tokens create USER --file token")


@command(
    tokens_app, "create", examples=["admin tokens create etl --expires 2160h --file etl.token"]
)
def create_token(
    session: Session,
    user: Annotated[str, typer.Argument(metavar="USER")],
    *,
    expires: Annotated[
        str, typer.Option(metavar="DURATION", help="When it ends, such as 720h; by default never.")
    ] = "",
    description: Annotated[str, typer.Option(help="What it is for.")] = "",
    file: Annotated[
        Path | None,
        typer.Option(metavar="FILE", help="Write it there, for its owner alone, not to show it."),
    ] = None,
) -> Reply:
    """Create a token for a user. Its secret is shown once and cannot be shown again.

    Programs name its file by token_file or KOINON_TOKEN_FILE, beside the identity file that 'koinon
    certs client' makes; clients of Redis send it by AUTH.
    """
    now = int(time.time())
    expires_s = now + duration_ms(expires) // 1000 if expires else 0
    token, text = make_token(user, created_s=now, expires_s=expires_s, description=description)
    made = TokenMade(id=token.id, user=user, expires_s=expires_s, file=str(file) if file else None)
    with session.admin() as admin:
        if file is not None:
            with open(file, "x", opener=opener) as out:
                out.write(text + "\n")
        try:
            admin.access.add_token(token)
        except BaseException:
            if file is not None:
                file.unlink()
            raise
        notes = [str(admin.access.behind)] if admin.access.behind.node_ids else []
    if file is not None:
        return Reply(made, f"Token {token.id} of {user} is in {file}.", notes=notes)
    revoked_by = f"'koinon admin tokens revoke {token.id}'"
    return Reply(
        replace(made, token=text),
        text,
        done=f"token {token.id} was made ({revoked_by} ends it), but its secret",
        notes=[*notes, f"This is token {token.id} of {user}. It is not shown again."],
    )


@command(tokens_app, "revoke", examples=["admin tokens revoke k3zq5w2hxa"])
def drop_token(
    session: Session, token_id: Annotated[str, typer.Argument(metavar="TOKEN")]
) -> Reply:
    """Refuse a token from now on. TOKEN is its id."""
    with session.admin() as admin:
        admin.access.drop_token(token_id)
        return _changed(admin, {"revoked": token_id}, f"Token {token_id} is refused from now on.")


def _day(seconds: int) -> str:
    return time.strftime("%Y-%m-%d", time.gmtime(seconds))


# --- certificates --------------------------------------------------------------------------------

_SERIAL_HELP = "As 'koinon certs show' tells it, in hexadecimal."
Serial = Annotated[str, typer.Argument(metavar="SERIAL", help=_SERIAL_HELP)]


@default_command(certificates_app)
def certificates(session: Session) -> Reply:
    """List the serial numbers of refused certificates."""
    with session.admin() as admin:
        serials = list(admin.access.state().revoked_serials)
    shown = Table([Column("REVOKED", str)], serials)
    return _listing(
        {"revoked": serials}, shown, "revoked certificate", "certificates revoke SERIAL"
    )


@command(certificates_app, "revoke", examples=["admin certificates revoke 5f3a9c"])
def revoke_certificate(session: Session, serial: Serial) -> Reply:
    """Refuse a certificate; open connections that use it end, too."""
    serial = _serial(serial)
    with session.admin() as admin:
        admin.access.revoke_certificate(serial)
        return _changed(admin, {"revoked": serial}, f"Certificate {serial} is refused from now on.")


@command(certificates_app, "restore", examples=["admin certificates restore 5f3a9c"])
def restore_certificate(session: Session, serial: Serial) -> Reply:
    """Accept a refused certificate again."""
    serial = _serial(serial)
    with session.admin() as admin:
        admin.access.restore_certificate(serial)
        return _changed(admin, {"restored": serial}, f"Certificate {serial} is taken again.")


def _serial(text: str) -> str:
    try:
        return serial_text(int(text.replace(":", ""), 16))
    except ValueError:
        raise InvalidArgumentError(
            field="SERIAL", reason=f"{text!r} is no number in hexadecimal: see 'koinon certs show'"
        ) from None
