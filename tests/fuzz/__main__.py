"""Fuzz a cluster for as long as you like: ``python -m tests.fuzz --minutes 60``.

Each round sends every method other messages; its number makes them again (``--first``). With
``--unauthenticated``, the cluster requires TLS, and its ports are sent what strangers can send.
"""

from __future__ import annotations

import argparse
import itertools
import tempfile
import time
from pathlib import Path

from tests.fuzz import strangers
from tests.fuzz.campaign import running
from tests.fuzz.messages import METHODS

EXAMPLES = 40
ATTACKS = 200


def main() -> None:
    """Fuzz until the time is over, or something does not hold."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--minutes", type=float, default=60.0)
    parser.add_argument("--first", type=int, default=1, help="the first round's number")
    parser.add_argument(
        "--unauthenticated", action="store_true", help="bytes of callers that have shown nothing"
    )
    options = parser.parse_args()
    end = time.monotonic() + 60 * options.minutes
    if options.unauthenticated:
        _strangers(options.first, end)
        return
    with running() as campaign:
        for number in itertools.count(options.first):
            for method in METHODS:
                campaign.fuzz(method, EXAMPLES, number)
                campaign.check()
            campaign.check_memory()
            print(
                f"round {number}: {campaign.sent} calls so far, "
                f"{campaign.beside.operations} operations beside them",
                flush=True,
            )
            if time.monotonic() > end:
                return


def _strangers(first: int, end: float) -> None:
    with tempfile.TemporaryDirectory() as directory, strangers.running(Path(directory)) as those:
        for number in itertools.count(first):
            for attack in range(ATTACKS):
                those.attack(number * ATTACKS + attack)
            those.check()
            those.check_memory()
            print(
                f"round {number}: {those.sent} connections so far, "
                f"{those.beside.operations} operations beside them",
                flush=True,
            )
            if time.monotonic() > end:
                return


if __name__ == "__main__":
    main()
