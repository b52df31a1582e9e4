"""Options of the benches of failures, and how these tell of their runs."""

from __future__ import annotations

import argparse
import json
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass


@dataclass(kw_only=True)
class FailureRun:
    """The figures of one failure."""

    kind: str
    worst_s: float  # the longest time that a write waited, over partitions
    failed: int


def options_of(doc: str | None, kinds: Sequence[str]) -> argparse.Namespace:
    """Return ``runs``, ``only`` and ``json`` from the command line."""
    parser = argparse.ArgumentParser(description=(doc or "").splitlines()[0])
    parser.add_argument("--runs", type=int, default=3)
    parser.add_argument("--only", default=",".join(kinds))
    parser.add_argument("--json", action="store_true")
    return parser.parse_args()


def tell(runs: Mapping[str, Sequence[FailureRun]], *, as_json: bool) -> None:
    """Print the figures of each kind of failure."""
    if as_json:
        print(json.dumps({kind: [asdict(run) for run in found] for kind, found in runs.items()}))
        return
    for kind, found in runs.items():
        worst = [run.worst_s for run in found]
        print(
            f"{kind}: all partitions take writes again after {statistics.median(worst):.2f} s "
            f"(median of {len(worst)}; worst {max(worst):.2f})"
        )
