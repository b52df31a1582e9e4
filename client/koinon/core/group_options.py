"""The options with which a consumer takes part in a group. Pure."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, get_args

from koinon_proto.contract.errors import InvalidArgumentError
from koinon_proto.contract.groups import (
    GROUP_NAME_CHARS_MAX,
    GROUP_SESSION_MS,
    GROUP_SESSION_MS_MAX,
    GROUP_SESSION_MS_MIN,
    GROUP_STATIC_SESSION_MS_MAX,
)

Strategy = Literal["sticky", "range", "round-robin"]
Start = Literal["beginning", "now"]


@dataclass(frozen=True, kw_only=True, slots=True)
class GroupOptions:
    """The options with which a consumer takes part in a group."""

    name: str
    strategy: Strategy | None = None
    member: str | None = None
    session_ms: int = GROUP_SESSION_MS
    start: Start = "beginning"

    def __post_init__(self) -> None:
        """Raises:
        InvalidArgumentError: an option is out of bounds.
        """
        for field, text in (("group", self.name), ("member", self.member)):
            if text is None and field == "member":
                continue
            if not isinstance(text, str) or not (
                0 < len(text) <= GROUP_NAME_CHARS_MAX and text.isprintable()
            ):
                raise InvalidArgumentError(
                    field=field,
                    reason="must have 1 to 128 printable characters",
                    limit=GROUP_NAME_CHARS_MAX,
                    actual=len(text) if isinstance(text, str) else 0,
                )
        if self.strategy is not None and self.strategy not in get_args(Strategy):
            raise InvalidArgumentError(
                field="strategy", reason=f"{self.strategy!r} is not sticky, range or round-robin"
            )
        if self.start not in ("beginning", "now"):
            raise InvalidArgumentError(
                field="start", reason=f"{self.start!r} is neither 'beginning' nor 'now'"
            )
        most = GROUP_SESSION_MS_MAX if self.member is None else GROUP_STATIC_SESSION_MS_MAX
        if not isinstance(self.session_ms, int) or not (
            GROUP_SESSION_MS_MIN <= self.session_ms <= most
        ):
            raise InvalidArgumentError(
                field="session_ms",
                reason=f"must be a whole number from {GROUP_SESSION_MS_MIN} to {most}",
                limit=most,
                actual=self.session_ms if isinstance(self.session_ms, int) else 0,
            )
