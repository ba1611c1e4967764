"""Prometheus families of an engine's state, made from `Snapshot`s at the moment of a scrape.

Scheduler and gateway both export them, each for the engines it knows: the names that vLLM has are vLLM's, the rest is
under `quire:`. What belongs to a request rather than to an engine (latencies, request lengths, vllm:request_success)
is the gateway's alone and not here. A gateway's endpoint covers every engine it is connected to, so that one of the
two, not both, should be scraped.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping
from itertools import accumulate
from typing import NamedTuple

from prometheus_client import (
    CONTENT_TYPE_PLAIN_0_0_4,
    GC_COLLECTOR,
    PLATFORM_COLLECTOR,
    PROCESS_COLLECTOR,
    CollectorRegistry,
    generate_latest,
)
from prometheus_client.core import (
    CounterMetricFamily,
    GaugeMetricFamily,
    HistogramMetricFamily,
    Metric,
    UnknownMetricFamily,
)
from prometheus_client.registry import Collector

from shared.protocol import STEP_TOKEN_BUCKETS, Snapshot

LABELS = ("model_name", "engine")
CACHE_LABELS = (
    "block_size",
    "num_gpu_blocks",
    "enable_prefix_caching",
    "kv_cache_size_tokens",
    "kv_cache_max_concurrency",  # sequences of the greatest length that fit at the same time
)


class Family(NamedTuple):
    """One family with a sample an engine; counters appear with `_total` behind their name."""

    name: str
    doc: str
    value: Callable[[Snapshot], float]


def _usage(snapshot: Snapshot) -> float:
    return 1.0 - snapshot.blocks_free / snapshot.blocks if snapshot.blocks else 0.0


def _waste(snapshot: Snapshot) -> float:
    held = (snapshot.blocks - snapshot.blocks_free) * snapshot.block_size
    return 1.0 - snapshot.tokens_held / held if held else 0.0


GAUGES = (
    Family("vllm:num_requests_running", "Sequences being computed.", lambda s: s.running),
    Family("vllm:num_requests_waiting", "Sequences waiting to be computed.", lambda s: s.waiting),
    Family("vllm:kv_cache_usage_perc", "Share of KV blocks in use, from 0 to 1.", _usage),
    Family("vllm:gpu_cache_usage", "The same under its older name; of KV on any device.", _usage),
    Family(
        "vllm:request_throughput_tok_per_second",
        "Tokens generated a second, over the last ten seconds.",
        lambda s: s.tokens_per_second,
    ),
    Family("quire:waiting_tokens", "Tokens of the waiting sequences.", lambda s: s.waiting_tokens),
    Family("quire:kv_blocks", "Blocks of KV memory in the pool.", lambda s: s.blocks),
    Family("quire:kv_blocks_free", "Blocks without a holder, cached ones included.", lambda s: s.blocks_free),
    Family("quire:kv_blocks_cached", "Blocks published in the prefix index.", lambda s: s.blocks_cached),
    Family("quire:kv_tokens_held", "Positions stored in held blocks, shared ones once.", lambda s: s.tokens_held),
    Family("quire:kv_block_size", "Positions in a block.", lambda s: s.block_size),
    Family("quire:kv_waste_perc", "Share of the positions in held blocks that store nothing, from 0 to 1.", _waste),
    Family("quire:steps_in_flight", "Plans sent whose result is not back.", lambda s: s.in_flight),
)

COUNTERS = (
    Family("vllm:num_preemptions", "Sequences that had to give up their KV blocks.", lambda s: s.preemptions),
    Family("vllm:prefix_cache_queries", "Prompt tokens looked up in the prefix index.", lambda s: s.prefix_queries),
    Family("vllm:prefix_cache_hits", "Prompt tokens found in the prefix index.", lambda s: s.prefix_hits),
    Family("vllm:prompt_tokens", "Prompt tokens computed or found in the prefix index.", lambda s: s.prompt_tokens),
    Family(
        "vllm:prompt_tokens_cached",
        "Prompt tokens found in the prefix index instead of being computed.",
        lambda s: s.prompt_tokens_cached,
    ),
    Family("vllm:generation_tokens", "Tokens generated.", lambda s: s.generation_tokens),
    Family("quire:steps", "Steps completed.", lambda s: s.steps),
    Family("quire:requests_accepted", "Requests taken into the queue.", lambda s: s.accepted),
    Family("quire:requests_refused", "Requests not taken into the queue.", lambda s: s.refused),
    Family("quire:worker_losses", "Times that a worker died, hung or failed.", lambda s: s.worker_losses),
)

UNTYPED = (Family("vllm:generation_token_count", "Tokens generated, without _total.", lambda s: s.generation_tokens),)


class Split(NamedTuple):
    """One family with a sample for each value of a label of its own."""

    name: str
    doc: str
    label: str
    values: Mapping[str, Callable[[Snapshot], float]]


SPLIT_GAUGES = (
    Split(
        "vllm:num_requests_waiting_by_reason",
        "Sequences waiting for room (capacity), or for a worker, a trial or their request's prompt (deferred).",
        "reason",
        {"capacity": lambda s: s.waiting - s.waiting_deferred, "deferred": lambda s: s.waiting_deferred},
    ),
)

SPLIT_COUNTERS = (
    Split(
        "vllm:prompt_tokens_by_source",
        "Prompt tokens, by where their KV came from.",
        "source",
        {
            "local_compute": lambda s: s.prompt_tokens - s.prompt_tokens_cached,
            "local_cache_hit": lambda s: s.prompt_tokens_cached,
        },
    ),
    Split(
        "vllm:admission_rejections",
        "Requests that found the queue full, by the limit that they met.",
        "reason",
        {
            "max_num_queued_reqs": lambda s: s.rejected_by_requests,
            "max_num_queued_tokens": lambda s: s.rejected_by_tokens,
        },
    ),
    Split(
        "quire:sequences_finished",
        "Sequences that ended.",
        "finished_reason",
        {
            "stop": lambda s: s.finished_stop,
            "length": lambda s: s.finished_length,
            "abort": lambda s: s.finished_abort,
            "error": lambda s: s.finished_error,
        },
    ),
)


class EngineCollector(Collector):
    """Makes the families from whatever `snapshots` returns, by name of engine; may be called from any thread."""

    def __init__(self, model_name: Callable[[], str], snapshots: Callable[[], Mapping[str, Snapshot]]) -> None:
        self._model_name = model_name
        self._snapshots = snapshots

    def collect(self) -> Iterator[Metric]:
        model, snapshots = self._model_name(), dict(self._snapshots())
        for family in GAUGES:
            yield _fill(GaugeMetricFamily(family.name, family.doc, labels=LABELS), family.value, model, snapshots)
        for family in COUNTERS:
            yield _fill(CounterMetricFamily(family.name, family.doc, labels=LABELS), family.value, model, snapshots)
        for family in UNTYPED:
            yield _fill(UnknownMetricFamily(family.name, family.doc, labels=LABELS), family.value, model, snapshots)
        for split in SPLIT_GAUGES:
            yield _split(GaugeMetricFamily, split, model, snapshots)
        for split in SPLIT_COUNTERS:
            yield _split(CounterMetricFamily, split, model, snapshots)
        yield _step_tokens(model, snapshots)
        yield _cache_config(model, snapshots)

    def describe(self) -> Iterable[Metric]:
        """The families without samples: registration must not need an engine."""
        return (family for family in EngineCollector(str, dict).collect())


def registry(*collectors: Collector) -> CollectorRegistry:
    """A registry of `collectors` and the client library's own figures of this process."""
    result = CollectorRegistry()
    for collector in (PROCESS_COLLECTOR, PLATFORM_COLLECTOR, GC_COLLECTOR, *collectors):
        result.register(collector)
    return result


def exposition(registry: CollectorRegistry) -> tuple[bytes, str]:
    """All figures as plain text, which every scraper takes, and the content type.

    Never OpenMetrics, which Prometheus would prefer: the client library writes `vllm_` for `vllm:` in it (0.26).
    """
    return generate_latest(registry), CONTENT_TYPE_PLAIN_0_0_4


def _fill(
    family: GaugeMetricFamily | CounterMetricFamily | UnknownMetricFamily,
    value: Callable[[Snapshot], float],
    model: str,
    snapshots: Mapping[str, Snapshot],
) -> Metric:
    for engine, snapshot in snapshots.items():
        family.add_metric((model, engine), value(snapshot))
    return family


def _split(
    kind: type[GaugeMetricFamily | CounterMetricFamily], split: Split, model: str, snapshots: Mapping[str, Snapshot]
) -> Metric:
    family = kind(split.name, split.doc, labels=(*LABELS, split.label))
    for engine, snapshot in snapshots.items():
        for value, count in split.values.items():
            family.add_metric((model, engine, value), count(snapshot))
    return family


def _step_tokens(model: str, snapshots: Mapping[str, Snapshot]) -> Metric:
    family = HistogramMetricFamily("vllm:iteration_tokens_total", "Tokens computed in a step.", labels=LABELS)
    bounds = [*(str(float(bound)) for bound in STEP_TOKEN_BUCKETS), "+Inf"]
    for engine, snapshot in snapshots.items():
        steps = snapshot.step_tokens or [0] * len(bounds)
        buckets = list(zip(bounds, accumulate(steps), strict=False))
        family.add_metric((model, engine), buckets, snapshot.step_tokens_sum)
    return family


def _cache_config(model: str, snapshots: Mapping[str, Snapshot]) -> Metric:
    doc = "Always 1: its labels say how the KV memory is cut, on any device."
    family = GaugeMetricFamily("vllm:cache_config_info", doc, labels=(*LABELS, *CACHE_LABELS))
    for engine, snapshot in snapshots.items():
        tokens = snapshot.blocks * snapshot.block_size
        longest = tokens / snapshot.max_model_len if snapshot.max_model_len else 0.0
        values = (snapshot.block_size, snapshot.blocks, snapshot.prefix_caching, tokens, f"{longest:.2f}")
        family.add_metric((model, engine, *map(str, values)), 1)
    return family
