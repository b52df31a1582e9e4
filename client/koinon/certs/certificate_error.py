"""The error for certificates, in a module of its own so that the command line can import it without
the rest.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from koinon_proto.contract.errors import KoinonError


@dataclass(kw_only=True, eq=False)
class CertificateError(KoinonError):
    """A file with a certificate or a key cannot be used or written; ``reason`` says why and what to
    do.
    """

    template: ClassVar[str] = "{e.path}: {e.reason}"

    path: str
    reason: str
