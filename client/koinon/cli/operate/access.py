"""admin users, roles, tokens and certificates: who may do what."""

from __future__ import annotations

import os
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Annotated, Any

import typer

from koinon.certs.authority import CLOCK_SKEW
from koinon.cli.console import output
from koinon.cli.console.help import Group
from koinon.cli.console.session import Body, Session, command, default_command, duration_ms
from koinon.cli.operate.plans import Yes, ask
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
from koinon_proto.process.printable import printable_bytes
from koinon_proto.process.private_files import opener

users_app = typer.Typer(cls=Group, help="Who is let in, and the roles that each has.")
roles_app = typer.Typer(cls=Group, help="What may be done: grants on keys and on the cluster.")
tokens_app = typer.Typer(cls=Group, help="Secrets by which programs say whose they are.")
certificates_app = typer.Typer(cls=Group, help="Certificates that are refused.")

ACTIONS = {action.name.lower(): action for action in Action}
_NAMES = ", ".join(ACTIONS)

Name = Annotated[str, typer.Argument(metavar="NAME")]
Allow = Annotated[
    str, typer.Option("--allow", metavar="ACTION,…", help=f"What is allowed: {_NAMES}.")
]
Deny = Annotated[str, typer.Option("--deny", metavar="ACTION,…", help="What is denied.")]
Prefix = Annotated[
    str, typer.Option("--prefix", help="Of the keys that are meant; by default all keys.")
]
Roles = Annotated[
    list[str] | None, typer.Option("--role", metavar="ROLE", help="May be given several times.")
]


def _actions(text: str, option: str) -> tuple[Action, ...]:
    names = [name.strip().lower() for name in text.split(",") if name.strip()]
    unknown = [name for name in names if name not in ACTIONS]
    if unknown:
        raise InvalidArgumentError(
            field=option, reason=f"{unknown[0]!r} is no action: there are {_NAMES}"
        )
    return tuple(sorted({ACTIONS[name] for name in names}))


def _grants(allow: str, deny: str, prefix: str) -> list[Grant]:
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
            found.append(Grant(effect=effect, actions=on_keys, prefix=os.fsencode(prefix)))
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
    session.say(f"User {name} is known.", {"user": name, "roles": list(_sorted(role))})


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
    session.say(f"User {name} is not known any more.", {"dropped": name})
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
    session.say(f"User {name} {what}. Roles: {listed}.", _user_json(user))


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
    state = _state(session)
    if session.json:
        output.print_json({"roles": [_role_json(role) for role in state.roles]})
        return
    shown = output.table("ROLE", "", "ACTIONS", "KEYS THAT BEGIN WITH", ">USERS")
    for role in state.roles:
        users = str(sum(role.name in user.roles for user in state.users))
        for number, grant in enumerate(role.grants or (None,)):
            shown.add_row(
                output.escape(role.name) if not number else "",
                *_grant_cells(grant),
                users if not number else "",
            )
    _show(shown, len(state.roles), "role", "koinon admin roles create NAME --allow read,write")


def create_role(
    session: Session, name: Name, *, allow: Allow = "", deny: Deny = "", prefix: Prefix = ""
) -> None:
    """Make a role, with a first grant if one is given."""
    role = Role(name=name, grants=tuple(_grants(allow, deny, prefix)))
    with session.admin() as admin:
        if any(other.name == name for other in admin.access.state().roles):
            raise InvalidArgumentError(
                field="NAME", reason=f"role {name} is there: 'koinon admin roles grant' adds to it"
            )
        admin.access.put_role(role)
    session.say(f"Role {name} is known.", _role_json(role))


def grant(
    session: Session, name: Name, *, allow: Allow = "", deny: Deny = "", prefix: Prefix = ""
) -> None:
    """Add a grant to a role. The longest prefix decides, and a denial among equal ones."""
    added = _grants(allow, deny, prefix)
    if not added:
        raise InvalidArgumentError(field="--allow", reason="give --allow or --deny")
    with session.admin() as admin:
        role = admin.access.alter_role(
            name, lambda grants: [*grants, *(one for one in added if one not in grants)]
        )
    session.say(f"Role {name} has {output.count(len(role.grants), 'grant')}.", _role_json(role))


def revoke(
    session: Session, name: Name, *, allow: Allow = "", deny: Deny = "", prefix: Prefix = ""
) -> None:
    """Take a grant from a role: name it as it was given."""
    gone = _grants(allow, deny, prefix)

    def without(grants: tuple[Grant, ...]) -> Sequence[Grant]:
        missing = [one for one in gone if one not in grants]
        if missing or not gone:
            raise InvalidArgumentError(
                field="--allow",
                reason=f"role {name} has no such grant: 'koinon admin roles' lists those it has",
            )
        return [one for one in grants if one not in gone]

    with session.admin() as admin:
        role = admin.access.alter_role(name, without)
    session.say(f"Role {name} has {output.count(len(role.grants), 'grant')}.", _role_json(role))


def drop_role(session: Session, name: Name, *, yes: Yes = False) -> int | None:
    """Forget a role that no user has."""
    if not yes and (refused := ask(session, f"Drop role {name}?")) is not None:
        return refused
    with session.admin() as admin:
        admin.access.drop_role(name)
    session.say(f"Role {name} is not known any more.", {"dropped": name})
    return None


def _grant_cells(grant: Grant | None) -> tuple[str, str, str]:
    if grant is None:
        return "", "[dim]none[/]", ""
    denies = grant.effect is Effect.DENY
    actions = ", ".join(action.name.lower() for action in grant.actions)
    of_cluster = all(action in CLUSTER_ACTIONS for action in grant.actions)
    keys = output.escape(printable_bytes(grant.prefix)) if grant.prefix else "[dim]all[/]"
    return "[red]deny[/]" if denies else "allow", actions, "[dim]-[/]" if of_cluster else keys


def _role_json(role: Role) -> dict[str, Any]:
    return {
        "role": role.name,
        "grants": [
            {
                "effect": grant.effect.name.lower(),
                "actions": [action.name.lower() for action in grant.actions],
                "prefix": output.json_bytes(grant.prefix),
            }
            for grant in role.grants
        ],
    }


# --- tokens --------------------------------------------------------------------------------------


def list_tokens(session: Session) -> None:
    """Tokens, without their secrets, which nobody but their holders knows."""
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
    session.say(f"Token {token_id} is refused from now on.", {"revoked": token_id})


def _day(seconds: int) -> str:
    return time.strftime("%Y-%m-%d", time.gmtime(seconds))


# --- certificates --------------------------------------------------------------------------------

Serial = Annotated[
    str, typer.Argument(metavar="SERIAL", help="As 'koinon certs show' tells it, in hexadecimal.")
]


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
    session.say(f"Certificate {serial} is refused from now on.", {"revoked": serial})


def restore_certificate(session: Session, serial: Serial) -> None:
    """Take a certificate again."""
    serial = _serial(serial)
    with session.admin() as admin:
        admin.access.restore_certificate(serial)
    session.say(f"Certificate {serial} is taken again.", {"restored": serial})


def _serial(text: str) -> str:
    try:
        return serial_text(int(text.replace(":", ""), 16))
    except ValueError:
        raise InvalidArgumentError(
            field="SERIAL", reason=f"{text!r} is no number in hexadecimal: see 'koinon certs show'"
        ) from None


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
            "grant": (grant, "loader --deny scan --prefix sales:secret:"),
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
