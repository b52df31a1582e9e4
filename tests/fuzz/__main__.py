"""Fuzz a cluster for as long as you like: ``python -m tests.fuzz --minutes 60``.

Each round sends every method other messages; its number makes them again (``--first``).
"""

from __future__ import annotations

import argparse
import itertools
import time

from tests.fuzz.campaign import running
from tests.fuzz.messages import METHODS

EXAMPLES = 40


def main() -> None:
    """Fuzz until the time is over, or something does not hold."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--minutes", type=float, default=60.0)
    parser.add_argument("--first", type=int, default=1, help="the first round's number")
    options = parser.parse_args()
    end = time.monotonic() + 60 * options.minutes
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


if __name__ == "__main__":
    main()
