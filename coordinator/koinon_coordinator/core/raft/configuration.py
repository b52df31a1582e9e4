"""The group's configuration and its history: voters, learners and their addresses.

A log entry has a whole configuration, which is in force from the moment it is appended, committed
or not (Raft dissertation, section 4.1). When its entry is truncated, the former configuration is in
force again. `ConfigurationHistory` keeps the configurations to which the log can still roll back.
"""

import json
from collections.abc import Mapping
from dataclasses import dataclass, field

CONFIGURATION_FORMAT_VERSION = 1


class ConfigurationFormatError(Exception):
    """A stored or received configuration has an unknown format."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Configuration:
    """The members of a group by role, each with its address (`host:port`)."""

    voters: Mapping[str, str] = field(default_factory=dict)
    learners: Mapping[str, str] = field(default_factory=dict)

    @property
    def quorum(self) -> int:
        """The number of voters in the smallest majority."""
        return len(self.voters) // 2 + 1

    @property
    def members(self) -> dict[str, str]:
        """Every member's address, voter or not."""
        return {**self.voters, **self.learners}

    def address_of(self, member_id: str) -> str | None:
        return self.voters.get(member_id) or self.learners.get(member_id)

    def __contains__(self, member_id: str) -> bool:
        return member_id in self.voters or member_id in self.learners

    def with_learner(self, member_id: str, address: str) -> "Configuration":
        return Configuration(voters=self.voters, learners={**self.learners, member_id: address})

    def with_promoted(self, member_id: str) -> "Configuration":
        learners = dict(self.learners)
        address = learners.pop(member_id)
        return Configuration(voters={**self.voters, member_id: address}, learners=learners)

    def without(self, member_id: str) -> "Configuration":
        return Configuration(
            voters={m: a for m, a in self.voters.items() if m != member_id},
            learners={m: a for m, a in self.learners.items() if m != member_id},
        )

    def encode(self) -> bytes:
        """Encode deterministically, with the format's version."""
        document = {
            "format_version": CONFIGURATION_FORMAT_VERSION,
            "voters": dict(self.voters),
            "learners": dict(self.learners),
        }
        return json.dumps(document, sort_keys=True, separators=(",", ":")).encode()

    @classmethod
    def decode(cls, encoded: bytes) -> "Configuration":
        """Decode the bytes of `encode`; raise ConfigurationFormatError for other bytes."""
        try:
            document = json.loads(encoded)
            version = document["format_version"]
            if version != CONFIGURATION_FORMAT_VERSION:
                raise ConfigurationFormatError(
                    f"configuration format {version!r} is not known here "
                    f"(this program reads {CONFIGURATION_FORMAT_VERSION})"
                )
            return cls(voters=dict(document["voters"]), learners=dict(document["learners"]))
        except (ValueError, KeyError, TypeError) as error:
            raise ConfigurationFormatError(f"not a configuration: {encoded[:80]!r}") from error


class ConfigurationHistory:
    """The configuration at the log's base and each one appended since, by log index."""

    def __init__(self, base_index: int, base: Configuration) -> None:
        self._versions: list[tuple[int, Configuration]] = [(base_index, base)]

    @property
    def current(self) -> Configuration:
        return self._versions[-1][1]

    @property
    def current_index(self) -> int:
        """Return the index at which the configuration in force was appended (or the base's)."""
        return self._versions[-1][0]

    def append(self, index: int, configuration: Configuration) -> None:
        self._versions.append((index, configuration))

    def truncate_from(self, index: int) -> None:
        """Roll back every configuration at or after `index`; the base always stays."""
        while len(self._versions) > 1 and self._versions[-1][0] >= index:
            self._versions.pop()

    def at(self, index: int) -> Configuration:
        """The configuration in force once `index` had been appended."""
        for appended_at, configuration in reversed(self._versions):
            if appended_at <= index:
                return configuration
        return self._versions[0][1]

    def compact_to(self, index: int) -> None:
        """Drop the configurations older than the one in force at `index`."""
        while len(self._versions) > 1 and self._versions[1][0] <= index:
            self._versions.pop(0)
