"""Draws throughput by the number of asyncio tasks: ``python -m bench.peers.plot JSON PNG``.

The JSON is that of ``python -m bench run peers --set rows=tasks1-get,…,tasks256-put --json JSON``.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

from bench.figures import Results
from bench.peers.rows import CONCURRENCY
from bench.peers.systems import SYSTEMS


def draw(results: Results, path: Path) -> None:
    """Draw gets beside puts, with a line for each system."""
    import matplotlib as mpl

    mpl.use("Agg")
    from matplotlib import pyplot as plt

    drawn, axes = plt.subplots(1, 2, figsize=(11, 4.2), sharex=True)
    for axis, what in zip(axes, ("get", "put"), strict=True):
        for name in SYSTEMS:
            rates = [(n, results.median(f"tasks{n}-{what}", name)) for n in CONCURRENCY]
            if points := [point for point in rates if point[1] is not None]:
                axis.plot(*zip(*points, strict=True), marker="o", label=name)
        axis.set(title=what, xscale="log", yscale="log", xlabel="asyncio tasks")
        axis.set_xticks(CONCURRENCY, [str(n) for n in CONCURRENCY])
        axis.grid(visible=True, which="both", alpha=0.3)
    axes[0].set_ylabel("operations a second, one client process")
    axes[1].legend(fontsize=8)
    drawn.tight_layout()
    drawn.savefig(path, dpi=120)


if __name__ == "__main__":
    draw(Results.from_json(json.loads(Path(sys.argv[1]).read_text())["peers"]), Path(sys.argv[2]))
