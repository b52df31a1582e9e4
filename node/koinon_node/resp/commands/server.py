"""Commands of Redis about the connection and the server."""

from __future__ import annotations

from koinon_node.resp import wire
from koinon_node.resp.commands.arguments import SYNTAX, integer
from koinon_node.resp.commands.spec import subcommands, wrong_number
from koinon_node.resp.error_replies import RefusedError
from koinon_node.resp.outcomes import Arguments, Outcome
from koinon_node.resp.session import Session
from koinon_proto.contract.access import Action
from koinon_proto.contract.errors import UnauthenticatedError

REDIS_VERSION = b"7.2.0"
"""The version of Redis that this server claims: clients choose their commands by it."""
_NAME_BYTES_MAX = 256
_NO_PASSWORD = "ERR AUTH: this server has no password and needs none"


def ping(session: Session, arguments: Arguments) -> Outcome:
    """Reply with PONG, or with the argument."""
    if len(arguments) > 2:
        raise wrong_number("ping")
    return wire.bulk(arguments[1]) if len(arguments) > 1 else wire.simple("PONG")


def echo(session: Session, arguments: Arguments) -> Outcome:
    """Reply with the argument."""
    return wire.bulk(arguments[1])


def time_(session: Session, arguments: Arguments) -> Outcome:
    """Reply with the node's Unix time: seconds, and microseconds."""
    seconds, ms = divmod(session.service.now_ms(), 1_000)
    return wire.bulks([b"%d" % seconds, b"%d" % (1_000 * ms)])


def quit_(session: Session, arguments: Arguments) -> Outcome:
    """Close the connection."""
    session.closing = True
    return wire.OK


def hello(session: Session, arguments: Arguments) -> Outcome:
    """Choose the protocol version; reply with facts about the server."""
    version, options = arguments[1:2], arguments[2:]
    if version and version[0] not in (b"2", b"3"):
        return wire.error("NOPROTO unsupported protocol version")
    name = session.name
    while options:
        if options[0].upper() == b"SETNAME" and len(options) > 1:
            name, options = _checked_name(options[1]), options[2:]
        elif options[0].upper() == b"AUTH" and len(options) > 2:
            _authenticate(session, options[2], options[1])
            options = options[3:]
        else:
            raise RefusedError(f"ERR Syntax error in HELLO option {options[0]!a}")
    session.check_known()
    session.name = name
    if version:
        session.resp3 = version[0] == b"3"
    facts = {
        b"server": wire.bulk(b"redis"),
        b"version": wire.bulk(REDIS_VERSION),
        b"proto": wire.integer(3 if session.resp3 else 2),
        b"id": wire.integer(session.number),
        b"mode": wire.bulk(b"cluster"),
        b"role": wire.bulk(b"master"),
        b"modules": wire.array([]),
    }
    pairs = [(wire.bulk(name), value) for name, value in facts.items()]
    return wire.map_of(pairs, resp3=session.resp3)


def auth(session: Session, arguments: Arguments) -> Outcome:
    """Authenticate the client by a token: AUTH [user] token."""
    if len(arguments) > 3:
        raise RefusedError(SYNTAX)
    _authenticate(session, arguments[-1], arguments[1] if len(arguments) == 3 else b"")
    return wire.OK


def _authenticate(session: Session, token: bytes, user: bytes) -> None:
    """Check and keep the token. Without TLS refuse it, so that a client which expects
    authentication gets an error.
    """
    if session.gate is None:
        raise RefusedError(_NO_PASSWORD)
    try:
        session.authenticate(token.decode("ascii", "replace"), user.decode("utf-8", "replace"))
    except UnauthenticatedError as error:
        raise RefusedError(f"WRONGPASS {error.reason}") from error


def accepted(session: Session, arguments: Arguments) -> Outcome:
    """Reply with OK, and change nothing."""
    return wire.OK


def select(session: Session, arguments: Arguments) -> Outcome:
    """Select database 0, the only one."""
    if integer(arguments[1]):
        raise RefusedError("ERR SELECT is not allowed in cluster mode")
    return wire.OK


def flush(session: Session, arguments: Arguments) -> Outcome:
    """Delete all keys of the keyspace, on all nodes."""
    if len(arguments) > 2 or [o for o in arguments[1:] if o.upper() not in (b"ASYNC", b"SYNC")]:
        raise RefusedError(SYNTAX)
    session.caller.check_prefix(Action.LOAD, session.served.keyspace_id, b"")
    return _flush(session, arguments[0].decode("ascii").upper())


async def _flush(session: Session, name: str) -> bytes:
    await session.service.emptier.empty(
        session.served.keyspace_id, f"{name} by {session.caller.name} at {session.peer}"
    )
    return wire.OK


def reset(session: Session, arguments: Arguments) -> Outcome:
    """Reset the connection's state, including its authentication by token."""
    session.forget()
    session.forget_transaction()
    session.name, session.resp3 = b"", False
    session.library.clear()
    return wire.simple("RESET")


# --- CLIENT ------------------------------------------------------------------------------------


def _checked_name(name: bytes) -> bytes:
    """Check a client's name, which must fit into CLIENT LIST."""
    if len(name) > _NAME_BYTES_MAX or any(not 33 <= byte <= 126 for byte in name):
        raise RefusedError(
            "ERR Client names cannot contain spaces, newlines or special characters."
        )
    return name


def _setname(session: Session, arguments: Arguments) -> Outcome:
    session.name = _checked_name(arguments[2])
    return wire.OK


def _getname(session: Session, arguments: Arguments) -> Outcome:
    return wire.bulk_or_nil(session.name or None)


def _setinfo(session: Session, arguments: Arguments) -> Outcome:
    option = arguments[2].lower()
    if option not in (b"lib-name", b"lib-ver"):
        raise RefusedError(f"ERR Unrecognized option {arguments[2][:64]!a}")
    session.library[option] = _checked_name(arguments[3])
    return wire.OK


def _id(session: Session, arguments: Arguments) -> Outcome:
    return wire.integer(session.number)


def _client_info(session: Session, arguments: Arguments) -> Outcome:
    peer = session.peer.partition(":")[2]
    library = session.library
    facts = {
        "id": str(session.number),
        "addr": peer,
        "name": session.name.decode("ascii"),
        "db": "0",
        "resp": "3" if session.resp3 else "2",
        "lib-name": library.get(b"lib-name", b"").decode("ascii"),
        "lib-ver": library.get(b"lib-ver", b"").decode("ascii"),
    }
    return wire.bulk(" ".join(f"{name}={value}" for name, value in facts.items()).encode() + b"\n")


def _switched(session: Session, arguments: Arguments) -> Outcome:
    """Reply with OK to ``CLIENT NO-EVICT`` and ``NO-TOUCH``. They change nothing, since this server
    evicts nothing.
    """
    if arguments[2].upper() not in (b"ON", b"OFF"):
        raise RefusedError(SYNTAX)
    return wire.OK


def _reply(session: Session, arguments: Arguments) -> Outcome:
    if arguments[2].upper() != b"ON":
        raise RefusedError("ERR replies cannot be turned off")
    return wire.OK


client = subcommands(
    {
        b"SETNAME": (3, _setname),
        b"GETNAME": (2, _getname),
        b"SETINFO": (4, _setinfo),
        b"ID": (2, _id),
        b"INFO": (2, _client_info),
        b"NO-EVICT": (3, _switched),
        b"NO-TOUCH": (3, _switched),
        b"REPLY": (3, _reply),
    }
)
