"""Registers the data source ``koinon`` by itself: Spark looks for ``DefaultSource`` in every
package on the Python path whose name begins with ``pyspark_``.
"""

import contextlib

with contextlib.suppress(ImportError):  # without its extra: Spark's other sources go on
    from koinon.spark.datasource import KoinonDataSource as DefaultSource

__all__ = ["DefaultSource"]
