"""Registers the data source ``koinon`` automatically: Spark imports ``DefaultSource`` from every
package on the Python path whose name begins with ``pyspark_``.
"""

import contextlib

# koinon's spark extra is missing: Spark's other sources still work
with contextlib.suppress(ImportError):
    from koinon.spark.datasource import KoinonDataSource as DefaultSource

__all__ = ["DefaultSource"]
