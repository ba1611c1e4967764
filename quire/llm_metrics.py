"""What `LLM.get_metrics` returns: the engine's metrics, as in a server's /metrics, in objects with vLLM's names.

Metrics of requests (latencies, lengths) are not among them: each `RequestOutput` has its own.
"""

from collections.abc import Iterator

from msgspec import Struct
from prometheus_client.core import Metric as Family

from shared.metrics import EngineCollector
from shared.protocol import Snapshot

SELF = "0"
"""The name of the engine, as in a server with one."""


class Metric(Struct, frozen=True, kw_only=True):
    """A metric. Several may have one name and different labels."""

    name: str
    labels: dict[str, str]


class Counter(Metric, frozen=True, kw_only=True):
    """A count that never gets smaller."""

    value: int


class Gauge(Metric, frozen=True, kw_only=True):
    """A number that may get larger and smaller."""

    value: float


class Histogram(Metric, frozen=True, kw_only=True):
    """Counts of observed values up to each bound, by the bound; the last one is `+Inf`."""

    count: int
    sum: float
    buckets: dict[str, int]


def read_metrics(model_name: str, snapshot: Snapshot) -> list[Metric]:
    """Return the present metrics of the engine that `snapshot` describes."""
    collector = EngineCollector(lambda: model_name, lambda: {SELF: snapshot})
    return [metric for family in collector.collect() for metric in _read(family)]


def _read(family: Family) -> Iterator[Metric]:
    if family.type == "histogram":
        yield _histogram(family)
    for sample in family.samples:
        if family.type == "gauge":
            yield Gauge(name=family.name, labels=sample.labels, value=sample.value)
        elif family.type == "counter":
            yield Counter(name=family.name, labels=sample.labels, value=int(sample.value))


def _histogram(family: Family) -> Histogram:
    """Return the family's histogram: there is one, since there is one engine."""
    values = {sample.name.removeprefix(family.name): sample for sample in family.samples}
    buckets = {s.labels["le"]: int(s.value) for s in family.samples if s.name.endswith("_bucket")}
    total = values["_count"]
    return Histogram(
        name=family.name, labels=total.labels, count=int(total.value), sum=values["_sum"].value, buckets=buckets
    )
