"""admin users, roles, tokens and certificates: who may do what."""

from __future__ import annotations

import os
import re
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from koinon.certs.authority import CLOCK_SKEW
from koinon.cli.console import output
from koinon.cli.console.help import Group
from koinon.cli.console.session import Body, Session, command, default_command, duration_ms
from koinon.cli.operate.rebalance_and_drain import Yes, ask
from koinon.operate.keyspaces import table_of
from koinon_proto.contract.access import (
    CLUSTER_ACTIONS,
    AccessState,
    Action,
    Effect,
    Grant,
    Role,
    User,
    make_token,
    serial_text,
)
from koinon_proto.contract.errors import InvalidArgumentError
from koinon_proto.contract.keyspaces import KeyspaceId, Keyspaces
from koinon_proto.process.printable import printable_bytes
from koinon_proto.process.private_files import opener

if TYPE_CHECKING:
    from koinon.operate.admin import Admin

users_app = typer.Typer(cls=Group, help="Who is let in, and the roles that each has.")
roles_app = typer.Typer(cls=Group, help="What may be done: grants on keys and on the cluster.")
tokens_app = typer.Typer(cls=Group, help="Secrets by which programs say whose they are.")
certificates_app = typer.Typer(cls=Group, help="Certificates that are refused.")

ACTIONS = {action.name.lower(): action for action in Action}
_NAMES = ", ".join(ACTIONS)

Name = Annotated[str, typer.Argument(metavar="NAME")]
_ALLOW_HELP = f"What is allowed: {_NAMES}."
Allow = Annotated[str, typer.Option("--allow", metavar="ACTION,…", help=_ALLOW_HELP)]
Deny = Annotated[str, typer.Option("--deny", metavar="ACTION,…", help="What is denied.")]
_PREFIX_HELP = "Of the keys that are meant; by default all keys."
Prefix = Annotated[str, typer.Option("--prefix", help=_PREFIX_HELP)]
_KEYSPACE_HELP = (
    "In which the grant holds; by default in every one, later ones included. One that was dropped: "
    "its id, such as id:7."
)
InKeyspace = Annotated[str, typer.Option("--keyspace", metavar="NAME", help=_KEYSPACE_HELP)]
_BY_ID = re.compile(r"id:(\d{1,9})")  # no keyspace's name has a colon
_ROLE_HELP = "May be given several times."
Roles = Annotated[list[str] | None, typer.Option("--role", metavar="ROLE", help=_ROLE_HELP)]


def _actions(text: str, option: str) -> tuple[Action, ...]:
    names = [name.strip().lower() for name in text.split(",") if name.strip()]
    unknown = [name for name in names if name not in ACTIONS]
    if unknown:
        raise InvalidArgumentError(
            field=option, reason=f"{unknown[0]!r} is no action: there are {_NAMES}"
        )
    return tuple(sorted({ACTIONS[name] for name in names}))


def _keyspace_id(admin: Admin, keyspace: str) -> KeyspaceId | None:
    """Return the id of the keyspace of this name, or of what names an id; None: "", every one.

    Raises:
        UnknownKeyspaceError: there is none of this name.
    """
    if not keyspace:
        return None
    if by_id := _BY_ID.fullmatch(keyspace):
        return KeyspaceId(int(by_id[1]))
    return table_of(admin.status()).keyspaces.named(keyspace).keyspace_id


def _keyspaces(admin: Admin, roles: Sequence[Role]) -> Keyspaces | None:
    """Return the keyspaces, if a grant of the roles names one."""
    if all(grant.keyspace_id is None for role in roles for grant in role.grants):
        return None
    return table_of(admin.status()).keyspaces


def _grants(
    allow: str, deny: str, prefix: str, keyspace_id: KeyspaceId | None = None
) -> list[Grant]:
    """Return the grants that the options name: those on the cluster have no prefix."""
    found = []
    for text, option, effect in (
        (allow, "--allow", Effect.ALLOW),
        (deny, "--deny", Effect.DENY),
    ):
        actions = _actions(text, option)
        on_cluster = tuple(action for action in actions if action in CLUSTER_ACTIONS)
        on_keys = tuple(action for action in actions if action not in CLUSTER_ACTIONS)
        if on_keys:
            found.append(
                Grant(
                    effect=effect,
                    actions=on_keys,
                    prefix=os.fsencode(prefix),
                    keyspace_id=keyspace_id,
                )
            )
        if on_cluster and keyspace_id is not None:
            name = on_cluster[0].name.lower()
            raise InvalidArgumentError(
                field="--keyspace", reason=f"{name} concerns no keyspace: grant it without one"
            )
        if on_cluster:
            found.append(Grant(effect=effect, actions=on_cluster))
    return found


# --- users ---------------------------------------------------------------------------------------


def list_users(session: Session) -> None:
    """Users, their roles and tokens. The user root may do everything and is not listed."""
    state = _state(session)
    if session.json:
        output.print_json({"users": [_user_json(user) for user in state.users]})
        return
    shown = output.table("USER", "ROLES", ">TOKENS", "STATE")
    for user in state.users:
        tokens = sum(token.user == user.name for token in state.tokens)
        shown.add_row(
            output.escape(user.name),
            output.escape(", ".join(user.roles)) or "[yellow]none[/]",
            str(tokens),
            "[red]blocked[/]" if user.blocked else "",
        )
    _show(shown, len(state.users), "user", "koinon admin users create NAME --role ROLE")


def create_user(session: Session, name: Name, *, role: Roles = None) -> None:
    """Make a user. Without a role it may do nothing.

    It comes in by a certificate (koinon certs user) or by a token (koinon admin tokens create).
    """
    with session.admin() as admin:
        if any(user.name == name for user in admin.access.state().users):
            raise InvalidArgumentError(
                field="NAME", reason=f"user {name} is there: 'koinon admin users grant' gives roles"
            )
        admin.access.put_user(User(name=name, roles=_sorted(role)))
        _say(session, admin, f"User {name} is known.", {"user": name, "roles": list(_sorted(role))})


def grant_roles(session: Session, name: Name, *, role: Roles = None) -> None:
    """Give a user roles, beside those that it has."""
    _alter_roles(session, name, role, gives=True)


def take_roles(session: Session, name: Name, *, role: Roles = None) -> None:
    """Take roles from a user."""
    _alter_roles(session, name, role, gives=False)


def block(session: Session, name: Name) -> None:
    """Let a user in no more, its tokens and certificates included."""
    _alter(session, name, lambda user: replace(user, blocked=True), "is blocked")


def unblock(session: Session, name: Name) -> None:
    """Let a user in again."""
    _alter(session, name, lambda user: replace(user, blocked=False), "is let in again")


def expire_certificates(session: Session, name: Name) -> None:
    """Refuse all certificates of a user that were issued before now; then issue a new one."""
    now = int(time.time()) - int(CLOCK_SKEW.total_seconds())  # from when one issued now holds
    _alter(
        session,
        name,
        lambda user: replace(user, certificates_from_s=now),
        "comes in by certificates that are issued from now on",
    )


def drop_user(session: Session, name: Name, *, yes: Yes = False) -> int | None:
    """Forget a user and its tokens."""
    if not yes and (refused := ask(session, f"Drop user {name} and its tokens?")) is not None:
        return refused
    with session.admin() as admin:
        admin.access.drop_user(name)
        _say(session, admin, f"User {name} is not known any more.", {"dropped": name})
    return None


def _alter_roles(session: Session, name: str, roles: list[str] | None, *, gives: bool) -> None:
    if not roles:
        raise InvalidArgumentError(field="--role", reason="name at least one")

    def change(user: User) -> User:
        now = {*user.roles, *roles} if gives else {*user.roles} - {*roles}
        return replace(user, roles=tuple(sorted(now)))

    _alter(session, name, change, "has other roles now")


def _alter(session: Session, name: str, change: Any, what: str) -> None:
    with session.admin() as admin:
        user = admin.access.alter_user(name, change)
        listed = ", ".join(user.roles) or "none"
        _say(session, admin, f"User {name} {what}. Roles: {listed}.", _user_json(user))


def _sorted(roles: list[str] | None) -> tuple[str, ...]:
    return tuple(sorted(set(roles or ())))


def _user_json(user: User) -> dict[str, Any]:
    return {
        "user": user.name,
        "roles": list(user.roles),
        "blocked": user.blocked,
        "certificates_from_s": user.certificates_from_s,
    }


# --- roles ---------------------------------------------------------------------------------------


def list_roles(session: Session) -> None:
    """Roles and their grants."""
    with session.admin() as admin:
        state = admin.access.state()
        keyspaces = _keyspaces(admin, state.roles)
    if session.json:
        output.print_json({"roles": [_role_json(role, keyspaces) for role in state.roles]})
        return
    shown = output.table("ROLE", "", "ACTIONS", "KEYSPACE", "KEYS THAT BEGIN WITH", ">USERS")
    for role in state.roles:
        users = str(sum(role.name in user.roles for user in state.users))
        for number, grant in enumerate(role.grants or (None,)):
            shown.add_row(
                output.escape(role.name) if not number else "",
                *_grant_cells(grant, keyspaces),
                users if not number else "",
            )
    _show(shown, len(state.roles), "role", "koinon admin roles create NAME --allow read,write")


def create_role(
    session: Session,
    name: Name,
    *,
    allow: Allow = "",
    deny: Deny = "",
    prefix: Prefix = "",
    keyspace: InKeyspace = "",
) -> None:
    """Make a role, with a first grant if one is given."""
    with session.admin() as admin:
        keyspace_id = _keyspace_id(admin, keyspace)
        role = Role(name=name, grants=tuple(_grants(allow, deny, prefix, keyspace_id)))
        if any(other.name == name for other in admin.access.state().roles):
            raise InvalidArgumentError(
                field="NAME", reason=f"role {name} is there: 'koinon admin roles grant' adds to it"
            )
        admin.access.put_role(role)
        answer = _role_json(role, _keyspaces(admin, [role]))
        _say(session, admin, f"Role {name} is known.", answer)


def grant(
    session: Session,
    name: Name,
    *,
    allow: Allow = "",
    deny: Deny = "",
    prefix: Prefix = "",
    keyspace: InKeyspace = "",
) -> None:
    """Add a grant to a role. The longest prefix decides, and a denial among equal ones.

    With --keyspace it holds in that keyspace alone. It ends when the keyspace is dropped, and does
    not come back with another one of the same name.
    """
    with session.admin() as admin:
        added = _grants(allow, deny, prefix, _keyspace_id(admin, keyspace))
        if not added:
            raise InvalidArgumentError(field="--allow", reason="give --allow or --deny")
        role = admin.access.alter_role(
            name, lambda grants: [*grants, *(one for one in added if one not in grants)]
        )
        _say_grants(session, admin, role)


def revoke(
    session: Session,
    name: Name,
    *,
    allow: Allow = "",
    deny: Deny = "",
    prefix: Prefix = "",
    keyspace: InKeyspace = "",
) -> None:
    """Take a grant from a role: name it as 'koinon admin roles' shows it."""
    with session.admin() as admin:
        gone = _grants(allow, deny, prefix, _keyspace_id(admin, keyspace))

        def without(grants: tuple[Grant, ...]) -> Sequence[Grant]:
            missing = [one for one in gone if one not in grants]
            if missing or not gone:
                raise InvalidArgumentError(
                    field="--allow",
                    reason=f"role {name} has no such grant: 'koinon admin roles' lists those it "
                    "has",
                )
            return [one for one in grants if one not in gone]

        role = admin.access.alter_role(name, without)
        _say_grants(session, admin, role)


def drop_role(session: Session, name: Name, *, yes: Yes = False) -> int | None:
    """Forget a role that no user has."""
    if not yes and (refused := ask(session, f"Drop role {name}?")) is not None:
        return refused
    with session.admin() as admin:
        admin.access.drop_role(name)
        _say(session, admin, f"Role {name} is not known any more.", {"dropped": name})
    return None


def _keyspace_name(keyspace_id: KeyspaceId | None, keyspaces: Keyspaces | None) -> str:
    """Return the name of the keyspace; "" if it was dropped, or none is meant."""
    if keyspace_id is None or keyspaces is None:
        return ""
    found = keyspaces.by_id(keyspace_id)
    return found.name if found is not None and not found.is_dropping else ""


def _grant_cells(grant: Grant | None, keyspaces: Keyspaces | None) -> tuple[str, str, str, str]:
    if grant is None:
        return "", "[dim]none[/]", "", ""
    denies = grant.effect is Effect.DENY
    actions = ", ".join(action.name.lower() for action in grant.actions)
    of_cluster = all(action in CLUSTER_ACTIONS for action in grant.actions)
    keys = output.escape(printable_bytes(grant.prefix)) if grant.prefix else "[dim]all[/]"
    if grant.keyspace_id is None:
        keyspace = "[dim]every[/]"
    elif name := _keyspace_name(grant.keyspace_id, keyspaces):
        keyspace = output.escape(name)
    else:
        keyspace = f"[yellow]id:{grant.keyspace_id} (dropped)[/]"
    where = ("[dim]-[/]", "[dim]-[/]") if of_cluster else (keyspace, keys)
    return "[red]deny[/]" if denies else "allow", actions, *where


def _role_json(role: Role, keyspaces: Keyspaces | None) -> dict[str, Any]:
    """``keyspace`` null, ``keyspace_id`` null: in every one; only ``keyspace`` null: dropped."""
    return {
        "role": role.name,
        "grants": [
            {
                "effect": grant.effect.name.lower(),
                "actions": [action.name.lower() for action in grant.actions],
                "prefix": output.json_bytes(grant.prefix),
                "keyspace": _keyspace_name(grant.keyspace_id, keyspaces) or None,
                "keyspace_id": grant.keyspace_id,
            }
            for grant in role.grants
        ],
    }


# --- tokens --------------------------------------------------------------------------------------


def list_tokens(session: Session) -> None:
    """Tokens, without their secrets, which only their holders know."""
    state, now = _state(session), time.time()
    if session.json:
        fields = ("id", "user", "created_s", "expires_s", "description")
        tokens = [{name: getattr(token, name) for name in fields} for token in state.tokens]
        output.print_json({"tokens": tokens})
        return
    shown = output.table("TOKEN", "USER", "CREATED", "EXPIRES", "WHAT")
    for token in state.tokens:
        over = 0 < token.expires_s <= now
        expires = _day(token.expires_s) if token.expires_s else "never"
        shown.add_row(
            token.id,
            output.escape(token.user),
            _day(token.created_s),
            f"[red]{expires}[/]" if over else expires,
            output.escape(token.description),
        )
    _show(shown, len(state.tokens), "token", "koinon admin tokens create USER --file token")


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
) -> None:
    """Make a token of a user. It is shown once, and cannot be shown again.

    Programs name its file by token_file or KOINON_TOKEN_FILE, beside the identity file that
    'koinon certs client' makes; clients of Redis send it by AUTH.
    """
    now = int(time.time())
    expires_s = now + duration_ms(expires) // 1000 if expires else 0
    token, text = make_token(user, created_s=now, expires_s=expires_s, description=description)
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
        _note_behind(admin)
    answer = {"id": token.id, "user": user, "expires_s": expires_s}
    if file is not None:
        session.say(f"Token {token.id} of {user} is in {file}.", {**answer, "file": str(file)})
    elif session.json:
        output.print_json({**answer, "token": text})
    else:
        output.note(f"token {token.id} of {user}, shown this once:")
        output.write_line(text)


def drop_token(session: Session, token_id: Annotated[str, typer.Argument(metavar="TOKEN")]) -> None:
    """Refuse a token from now on. Name it by its id."""
    with session.admin() as admin:
        admin.access.drop_token(token_id)
        _say(session, admin, f"Token {token_id} is refused from now on.", {"revoked": token_id})


def _day(seconds: int) -> str:
    return time.strftime("%Y-%m-%d", time.gmtime(seconds))


# --- certificates --------------------------------------------------------------------------------

_SERIAL_HELP = "As 'koinon certs show' tells it, in hexadecimal."
Serial = Annotated[str, typer.Argument(metavar="SERIAL", help=_SERIAL_HELP)]


def list_certificates(session: Session) -> None:
    """Serial numbers of certificates that are refused."""
    serials = _state(session).revoked_serials
    if session.json:
        output.print_json({"revoked": list(serials)})
        return
    shown = output.table("REVOKED")
    for serial in serials:
        shown.add_row(serial)
    _show(shown, len(serials), "revoked certificate", "koinon admin certificates revoke SERIAL")


def revoke_certificate(session: Session, serial: Serial) -> None:
    """Refuse a certificate, whoever's it is: connections by it end, too."""
    serial = _serial(serial)
    with session.admin() as admin:
        admin.access.revoke_certificate(serial)
        _say(session, admin, f"Certificate {serial} is refused from now on.", {"revoked": serial})


def restore_certificate(session: Session, serial: Serial) -> None:
    """Take a certificate again."""
    serial = _serial(serial)
    with session.admin() as admin:
        admin.access.restore_certificate(serial)
        _say(session, admin, f"Certificate {serial} is taken again.", {"restored": serial})


def _serial(text: str) -> str:
    try:
        return serial_text(int(text.replace(":", ""), 16))
    except ValueError:
        raise InvalidArgumentError(
            field="SERIAL", reason=f"{text!r} is no number in hexadecimal: see 'koinon certs show'"
        ) from None


def _say(session: Session, admin: Admin, text: str, answer: dict[str, Any]) -> None:
    """Say what was changed, and which nodes have not said that they go by it."""
    nodes = list(admin.access.behind.node_ids)
    session.say(text, {**answer, "nodes_behind": nodes} if nodes else answer)
    _note_behind(admin)


def _note_behind(admin: Admin) -> None:
    if remark := str(admin.access.behind):
        output.note(remark)


def _say_grants(session: Session, admin: Admin, role: Role) -> None:
    grants = output.count(len(role.grants), "grant")
    answer = _role_json(role, _keyspaces(admin, [role]))
    _say(session, admin, f"Role {role.name} has {grants}.", answer)


def _state(session: Session) -> AccessState:
    with session.admin() as admin:
        return admin.access.state()


def _show(made: Any, rows: int, noun: str, example: str) -> None:
    if rows:
        output.show(made)
    else:
        output.console().print(f"There is no {noun} yet. For example: {example}", markup=False)


default_command(users_app, list_users)
default_command(roles_app, list_roles)
default_command(tokens_app, list_tokens)
default_command(certificates_app, list_certificates)
_CHANGES: tuple[tuple[typer.Typer, str, dict[str, tuple[Body, str]]], ...] = (
    (
        users_app,
        "users",
        {
            "create": (create_user, "etl --role loader"),
            "grant": (grant_roles, "etl --role reader"),
            "revoke": (take_roles, "etl --role reader"),
            "block": (block, "etl"),
            "unblock": (unblock, "etl"),
            "expire-certificates": (expire_certificates, "etl"),
            "drop": (drop_user, "etl"),
        },
    ),
    (
        roles_app,
        "roles",
        {
            "create": (create_role, "loader --allow load,scan --prefix sales:"),
            "grant": (grant, "loader --allow read --prefix sales: --keyspace vip"),
            "revoke": (revoke, "loader --deny scan --prefix sales:secret:"),
            "drop": (drop_role, "loader"),
        },
    ),
    (
        tokens_app,
        "tokens",
        {
            "create": (create_token, "etl --expires 2160h --file etl.token"),
            "revoke": (drop_token, "k3zq5w2hxa"),
        },
    ),
    (
        certificates_app,
        "certificates",
        {
            "revoke": (revoke_certificate, "5f3a9c"),
            "restore": (restore_certificate, "5f3a9c"),
        },
    ),
)
for _app, _group, _commands in _CHANGES:
    for _name, (_function, _arguments) in _commands.items():
        command(_app, _name, examples=[f"koinon admin {_group} {_name} {_arguments}"])(_function)


def add_to(parent: typer.Typer, panel: str) -> None:
    """Add the groups."""
    for group, name in (
        (users_app, "users"),
        (roles_app, "roles"),
        (tokens_app, "tokens"),
        (certificates_app, "certificates"),
    ):
        parent.add_typer(group, name=name, rich_help_panel=panel)
