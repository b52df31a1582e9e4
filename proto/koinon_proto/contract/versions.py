"""The version of the protocol between nodes and coordinators, and among nodes.

Members of the Raft group have a version of their own (coordinator ``raft/transport.py``), the table
and each disk format another.
"""

from koinon_proto.contract.errors import UnsupportedVersionError

NODE_PROTOCOL_VERSION = 1


def check_node_protocol(version: int, what: str) -> None:
    """Refuse a sender that speaks another version of ``what``.

    Raises:
        UnsupportedVersionError
    """
    if version != NODE_PROTOCOL_VERSION:
        raise UnsupportedVersionError(what=what, version=version, supported=NODE_PROTOCOL_VERSION)
