"""The command by which another node asks for the stream of the commit groups of this one.

KOINON.FOLLOW 1
    -> +OK; from here on the connection carries frames (koinon_proto.server.framed_stream)
"""

from __future__ import annotations

from koinon_node.ports import FOLLOW
from koinon_node.resp import errors
from koinon_node.resp.commands.koinon_commands import number
from koinon_node.resp.commands.table import Arguments, Outcome, Switch, command
from koinon_node.resp.session import Session
from koinon_proto.contract.errors import UnsupportedVersionError
from koinon_proto.security import method_permissions

FRAMES_VERSION = 1


@command("KOINON.FOLLOW", 2, errors.own, flags=("admin",))
def follow(session: Session, arguments: Arguments) -> Outcome:
    """Stream to a follower: for whom the method of gRPC is, too."""
    version = number(arguments[1], "protocol")
    if version != FRAMES_VERSION:
        raise UnsupportedVersionError(
            what="the frames of KOINON.FOLLOW", version=version, supported=FRAMES_VERSION
        )
    method_permissions.check(FOLLOW, session.caller)
    followers = session.service.followers
    return Switch(lambda: followers.take_follower(session.caller_that_stays, session.peer))
