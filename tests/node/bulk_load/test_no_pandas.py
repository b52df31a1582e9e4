"""The work on bulk loads does not make pyarrow import pandas, which takes 0.3 s of CPU."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("pandas", reason="pandas is not installed: nothing could import it")

_SCRIPT = """
import sys
from pathlib import Path
from koinon_node.bulk_load import staged_chunks
from koinon_node.store_config import StoreConfig
from koinon_node.storage import merge_executor
from koinon_node.storage.store import Store
from koinon_proto.contract import columns
from tests.node.kit.staged_chunks import LOAD, Partition, chunk_of, manifest_of

lots = [[(b"a", b"1"), (b"c", b"3")], [(b"a", b"2"), (b"d", b"")]]
assert merge_executor.first_out_of_order(columns.gather(list(map(chunk_of, lots)))) is None
with Store(StoreConfig(directory=Path(sys.argv[1]))) as store:
    partition = Partition(store)
    for attempt, rows in enumerate(lots, 1):
        partition.stage(attempt, 0, rows, expires_at_ms=1_000 * attempt)
    partition.stage(2, 1, [(b"e", b"")], expiries=[columns.DELETED])
    found = staged_chunks.prepare(store, LOAD, frozenset((1, 2)), 0, 5, find_duplicates=True)
    assert (found.rows, found.keys) == (1, (b"a",)), found
    step = staged_chunks.next_step(store, manifest_of(1, 2), 0)
    step.sequence = 9
    partition.merge(step)
print("pyarrow" in sys.modules, "pandas" in sys.modules)
"""


def test_merging_and_preparing_import_arrow_and_no_pandas(tmp_path: Path) -> None:
    ended = subprocess.run(
        [sys.executable, "-c", _SCRIPT, str(tmp_path)], capture_output=True, text=True, check=False
    )
    assert ended.stdout.split() == ["True", "False"], ended.stderr
