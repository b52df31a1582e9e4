"""Decides what a client's command comes to: its outcome, or the reply of its refusal."""

from __future__ import annotations

import logging
from typing import Final

from koinon_node.resp import wire
from koinon_node.resp.commands import accounting, rules, transactions
from koinon_node.resp.commands.spec import Spec, find, wrong_number
from koinon_node.resp.outcomes import Arguments, Outcome
from koinon_node.resp.session import Session
from koinon_proto.contract.errors import InternalError, KoinonError
from koinon_proto.security.authentication import Authenticator
from koinon_proto.server.requests import Method

log = logging.getLogger(__name__)

_NAME_BYTES_SHOWN: Final = 128

Pending = tuple[Spec, Outcome, Arguments]
"""A command that was parsed and is not answered."""


def _not_known(_session: Session, arguments: Arguments) -> Outcome:
    name = ascii(arguments[0][:_NAME_BYTES_SHOWN].decode("utf-8", "replace"))
    return wire.error(f"ERR unknown command {name}")


_NOT_KNOWN = Spec("unknown", -1, _not_known, "", Method("Redis", "unknown", stream=False))


def outcome_of(session: Session, arguments: Arguments, gate: Authenticator) -> Pending:
    """Return the command with its outcome, or with the reply of its refusal. Raises nothing.
    ``gate`` counts commands of clients that have shown nothing.
    """
    spec = find(arguments[0]) or _NOT_KNOWN
    if not spec.takes(len(arguments)):
        session.spoil_transaction()
        return spec, wire.error(wrong_number(spec.name.lower()).reason), arguments
    try:
        if session.gate is None:
            gate.unidentified["redis"] += 1
        elif "no_auth" not in spec.flags:
            session.check_known()
            rules.check(spec, arguments, session)
        if spec.names_keys:
            _ = session.served  # looked up here, where an error becomes the reply
        queueing = session.transaction
        if spec is _NOT_KNOWN:
            session.spoil_transaction()
        elif queueing is not None and spec.name not in transactions.AT_ONCE:
            queued = transactions.queue(session, queueing, spec, arguments)
            accounting.ended(session, spec, 0.0)
            return spec, queued, arguments
        return spec, spec.handler(session, arguments), arguments
    except KoinonError as error:
        session.spoil_transaction()
        return spec, accounting.failed(session, spec, error), arguments
    except Exception as error:
        session.spoil_transaction()
        log.exception("a command failed command=%s", spec.name)
        reply = accounting.failed(session, spec, InternalError(reason=str(error)))
        return spec, reply, arguments
