"""Accounts for ended commands: metrics, the audit log, the slow log, and error replies."""

from __future__ import annotations

import logging

from koinon_node.resp import error_replies
from koinon_node.resp.commands.spec import Spec
from koinon_node.resp.session import Session
from koinon_node.resp.slow_log import SLOWER_THAN_S
from koinon_proto.contract import request_ids
from koinon_proto.contract.errors import KoinonError, NotPrimaryError, UnknownKeyspaceError
from koinon_proto.server import requests

log = logging.getLogger(__name__)


def ended(
    session: Session,
    spec: Spec,
    elapsed_s: float,
    *,
    outcome: str = requests.OK,
    request_id: str = "",
    count: int = 1,
    error: KoinonError | None = None,
) -> None:
    """Count ``count`` requests of one command that took ``elapsed_s`` together, and enter them in
    the audit log and, if they were slow, in the slow log.
    """
    spec.method.ended(elapsed_s, outcome, count)
    audit(session, spec, outcome=outcome, request_id=request_id, count=count, error=error)
    if elapsed_s >= SLOWER_THAN_S:
        service = session.service
        service.slow_log.add(
            service.now_ms(), elapsed_s, spec.name.lower(), session.peer, session.name
        )
    slow = requests.slow
    if elapsed_s >= slow.after_s and slow.may_log():
        with request_ids.handled(request_id):
            log.warning(
                "slow request method=%s took_ms=%.1f outcome=%s peer=%s unlogged=%d",
                spec.method.path,
                1000 * elapsed_s,
                outcome,
                session.peer,
                slow.take_unlogged(),
            )


def audit(
    session: Session,
    spec: Spec,
    *,
    outcome: str,
    request_id: str,
    count: int = 1,
    error: KoinonError | None = None,
) -> None:
    """Enter ``count`` requests of one command with their outcome in the audit log, if it covers
    them.
    """
    log_of_audit, method = session.audit, f"redis:{spec.name}"
    if log_of_audit.is_on and log_of_audit.wants(method, outcome, count):
        keyspace = session.keyspace_name if spec.is_about_keys else ""
        name = session.caller.name
        log_of_audit.note(name, session.peer, method, outcome, request_id, error, keyspace)


def failed(
    session: Session,
    spec: Spec,
    error: KoinonError,
    request_id: str = "",
    elapsed_s: float = 0.0,
    key: bytes | None = None,
) -> bytes:
    """Account for a command that ended with an error; return its reply. For a ``key`` that another
    node serves, the reply redirects the client.
    """
    request_id = request_id or request_ids.fresh()
    outcome = error_replies.outcome_of(error)
    ended(session, spec, elapsed_s, outcome=outcome, request_id=request_id, error=error)
    if log.isEnabledFor(logging.DEBUG):
        with request_ids.handled(request_id):
            log.debug(
                "request refused method=%s error=%s peer=%s", spec.method.path, error, session.peer
            )
    moved_to = ""
    if key:
        error = session.caller.told(error, session.served.keyspace_id, key)
    if isinstance(error, NotPrimaryError) and key:
        moved_to = session.served.moved_to(key)
    elif isinstance(error, UnknownKeyspaceError) and not spec.is_own:
        session.closing |= session.is_bound  # a new connection may find a new keyspace of that name
    return spec.fail(error, request_id, moved_to)
