"""A storage node that counts its calls: SIGUSR1 restarts the count, SIGUSR2 writes it.

The counts go to the file ``PID.json`` in the folder that ``KOINON_WALK`` names: from
``module:function`` to the number of calls of our own functions on the event loop's thread.
"""

from __future__ import annotations

import json
import os
import signal
import sys
from collections import Counter
from pathlib import Path
from types import CodeType, FrameType

from koinon_node.__main__ import main

OURS = ("koinon_node", "koinon_proto")
_counted: Counter[CodeType] = Counter()


def _count(frame: FrameType, event: str, _argument: object) -> None:
    if event == "call":
        _counted[frame.f_code] += 1


def _begin(_number: int, _frame: FrameType | None) -> None:
    _counted.clear()
    sys.setprofile(_count)


def _write(_number: int, _frame: FrameType | None) -> None:
    sys.setprofile(None)
    calls: Counter[str] = Counter()
    for code, count in _counted.items():
        for package in OURS:
            if f"/{package}/" in code.co_filename:
                module = code.co_filename.rpartition(f"/{package}/")[2].removesuffix(".py")
                calls[f"{package}/{module}:{code.co_qualname}"] += count
    target = Path(os.environ["KOINON_WALK"], f"{os.getpid()}.json")
    target.with_suffix(".part").write_text(json.dumps(calls))
    target.with_suffix(".part").rename(target)


if __name__ == "__main__":
    signal.signal(signal.SIGUSR1, _begin)
    signal.signal(signal.SIGUSR2, _write)
    main()
