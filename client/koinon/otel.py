"""A client's metrics in OpenTelemetry. Needs the ``otel`` extra: ``pip install 'koinon[otel]'``.

>>> client = koinon.connect("127.0.0.1:7400", observer=koinon.otel.observer())

Two instruments, named by OpenTelemetry's conventions for databases where these apply:
``db.client.operation.duration`` (a histogram, in seconds; its count is that of operations) and
``koinon.client.rows`` (a counter). Both have ``db.system.name`` (koinon), the name of the operation
(``db.operation.name``) and for failed operations the outcome (``error.type``).
"""

from __future__ import annotations

from opentelemetry.metrics import MeterProvider, get_meter_provider

from koinon.types import Observation, Observer

_BOUNDS_S = (0.000_1, 0.000_5, 0.001, 0.005, 0.01, 0.05, 0.1, 0.5, 1, 5, 10)


def observer(meter_provider: MeterProvider | None = None) -> Observer:
    """Return an observer for the ``observer`` option of ``connect``; clients may share it.
    ``meter_provider`` None: the global one.
    """
    meter = (meter_provider or get_meter_provider()).get_meter("koinon")
    durations = meter.create_histogram(
        "db.client.operation.duration",
        unit="s",
        description="Duration of client operations, retries included",
        explicit_bucket_boundaries_advisory=_BOUNDS_S,
    )
    rows = meter.create_counter(
        "koinon.client.rows", unit="{row}", description="Rows that operations were about"
    )

    def observe(observation: Observation) -> None:
        attributes = {"db.system.name": "koinon", "db.operation.name": observation.operation}
        if observation.outcome != "ok":
            attributes["error.type"] = observation.outcome
        durations.record(observation.seconds, attributes)
        rows.add(observation.rows, attributes)

    return observe
