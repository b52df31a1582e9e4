"""The daemon that forks Spark's Python workers, with what they import imported already: a write of
a few rows starts several, and each would import for half a second.
"""

from __future__ import annotations

import gc
from importlib import import_module

from pyspark.daemon import manager

IMPORTED = (
    *("pandas", "pyarrow.parquet", "koinon.client", "koinon.spark.datasource"),
    *("koinon.spark.reading", "koinon.spark.writing.jobs", "koinon.spark.writing.tasks"),
)

if __name__ == "__main__":
    for module in IMPORTED:
        import_module(module)
    gc.collect()
    gc.freeze()  # a worker collects garbage after each task
    manager()
