"""Prometheus metrics of an engine's state, computed from `Snapshot`s at the moment of a scrape.

Scheduler and gateway both export them, each for the engines that it knows. Metrics that vLLM has keep vLLM's names, the
others begin with `quire:`. Metrics of requests (latencies, lengths, vllm:request_success) are not here: only the
gateway has them. A gateway exports the metrics of every engine that it is connected to, so scrape gateways or
schedulers, not both.
"""

import time
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
LORA_LABELS = ("max_lora", "waiting_lora_adapters", "running_lora_adapters")
CACHE_LABELS = (
    "block_size",
    "num_gpu_blocks",
    "enable_prefix_caching",
    "kv_cache_size_tokens",
    "kv_cache_max_concurrency",  # number of sequences of maximum length that fit at the same time
)

DETECTION_BUCKETS = (.005, .01, .025, .05, .1, .25, .5, 1, 1.5, 2, 2.5, 3, 4, 5, 10, 30, 60, 120, 300)  # fmt: skip
"""Bounds in seconds: milliseconds for a process that ended, about two seconds for one that hangs."""

RECOVERY_BUCKETS = (.01, .025, .05, .1, .25, .5, .75, 1, 1.5, 2, 3, 4, 5, 7.5, 10, 20, 30, 60, 120, 300)  # fmt: skip
"""Bounds in seconds: less than one if another process takes over at once, up to minutes if a model has to load."""


class MetricFamily(NamedTuple):
    """A metric with one sample per engine. The client library adds `_total` to the names of counters."""

    name: str
    doc: str
    value: Callable[[Snapshot], float]


def _kv_usage(snapshot: Snapshot) -> float:
    return 1.0 - snapshot.blocks_free / snapshot.blocks if snapshot.blocks else 0.0


def _kv_waste(snapshot: Snapshot) -> float:
    held = (snapshot.blocks - snapshot.blocks_free) * snapshot.block_size
    return 1.0 - snapshot.tokens_held / held if held else 0.0


def _host_usage(snapshot: Snapshot) -> float:
    return 1.0 - snapshot.host_blocks_free / snapshot.host_blocks if snapshot.host_blocks else 0.0


def _host_hit_rate(snapshot: Snapshot) -> float:
    return snapshot.host_prefix_hits / snapshot.host_prefix_queries if snapshot.host_prefix_queries else 0.0


GAUGES = (
    MetricFamily("vllm:num_requests_running", "Sequences being computed.", lambda s: s.running),
    MetricFamily("vllm:num_requests_waiting", "Sequences waiting to be computed.", lambda s: s.waiting),
    MetricFamily(
        "vllm:num_requests_swapped", "The waiting sequences whose KV is kept in host memory.", lambda s: s.swapped
    ),
    MetricFamily("vllm:kv_cache_usage_perc", "Share of KV blocks in use, from 0 to 1.", _kv_usage),
    MetricFamily("vllm:gpu_cache_usage", "The same as vllm:kv_cache_usage_perc, under its older name.", _kv_usage),
    MetricFamily(
        "vllm:cpu_cache_usage_perc",
        "Share of the host memory for KV that swapped sequences hold, from 0 to 1.",
        _host_usage,
    ),
    MetricFamily(
        "vllm:cpu_prefix_cache_hit_rate",
        "Share of the tokens looked up in host memory that were found there, since the start, from 0 to 1.",
        _host_hit_rate,
    ),
    MetricFamily(
        "vllm:request_throughput_tok_per_second",
        "Tokens generated per second, over the last ten seconds.",
        lambda s: s.tokens_per_second,
    ),
    MetricFamily("quire:waiting_tokens", "Tokens of the waiting sequences.", lambda s: s.waiting_tokens),
    MetricFamily("quire:kv_blocks", "Blocks of KV memory in the pool.", lambda s: s.blocks),
    MetricFamily(
        "quire:kv_blocks_free", "Blocks that no sequence holds, cached ones included.", lambda s: s.blocks_free
    ),
    MetricFamily("quire:kv_blocks_cached", "Blocks in the prefix index.", lambda s: s.blocks_cached),
    MetricFamily(
        "quire:kv_tokens_held", "Positions stored in held blocks, shared blocks counted once.", lambda s: s.tokens_held
    ),
    MetricFamily("quire:kv_block_size", "Positions in a block.", lambda s: s.block_size),
    MetricFamily(
        "quire:kv_waste_perc", "Share of the positions in held blocks that store nothing, from 0 to 1.", _kv_waste
    ),
    MetricFamily("quire:kv_block_bytes", "Bytes of a block, in all layers.", lambda s: s.block_bytes),
    MetricFamily("quire:host_kv_blocks", "Blocks of host memory for KV.", lambda s: s.host_blocks),
    MetricFamily(
        "quire:host_kv_blocks_free",
        "Blocks of host memory that no swapped sequence holds, cached ones included.",
        lambda s: s.host_blocks_free,
    ),
    MetricFamily(
        "quire:host_kv_blocks_cached", "Blocks of host memory in the prefix index.", lambda s: s.host_blocks_cached
    ),
    MetricFamily("quire:steps_in_flight", "Plans sent whose result has not come yet.", lambda s: s.in_flight),
)

COUNTERS = (
    MetricFamily(
        "vllm:num_preemptions", "Preemptions: sequences that had to give up their KV blocks.", lambda s: s.preemptions
    ),
    MetricFamily(
        "vllm:prefix_cache_queries", "Prompt tokens looked up in the prefix index.", lambda s: s.prefix_queries
    ),
    MetricFamily("vllm:prefix_cache_hits", "Prompt tokens found in the prefix index.", lambda s: s.prefix_hits),
    MetricFamily(
        "vllm:prompt_tokens", "Prompt tokens computed or found in the prefix index.", lambda s: s.prompt_tokens
    ),
    MetricFamily(
        "vllm:prompt_tokens_cached",
        "Prompt tokens found in the prefix index instead of being computed.",
        lambda s: s.prompt_tokens_cached,
    ),
    MetricFamily("vllm:generation_tokens", "Tokens generated.", lambda s: s.generation_tokens),
    MetricFamily(
        "quire:swapped_preemptions",
        "The preemptions after which the KV was kept in host memory.",
        lambda s: s.preemptions_swapped,
    ),
    MetricFamily(
        "quire:host_prefix_cache_queries",
        "Prompt tokens looked up in host memory, since the device did not have them.",
        lambda s: s.host_prefix_queries,
    ),
    MetricFamily("quire:host_prefix_cache_hits", "Prompt tokens found in host memory.", lambda s: s.host_prefix_hits),
    MetricFamily("quire:blocks_swapped_out", "Blocks copied to host memory.", lambda s: s.blocks_swapped_out),
    MetricFamily("quire:blocks_swapped_in", "Blocks copied back from host memory.", lambda s: s.blocks_swapped_in),
    MetricFamily(
        "quire:swapped_out_bytes", "Bytes copied to host memory.", lambda s: s.blocks_swapped_out * s.block_bytes
    ),
    MetricFamily(
        "quire:swapped_in_bytes", "Bytes copied back from host memory.", lambda s: s.blocks_swapped_in * s.block_bytes
    ),
    MetricFamily("quire:steps", "Steps completed.", lambda s: s.steps),
    MetricFamily("quire:requests_accepted", "Requests taken into the queue.", lambda s: s.accepted),
    MetricFamily("quire:requests_refused", "Requests not taken into the queue.", lambda s: s.refused),
    MetricFamily(
        "quire:prefix_cache_resets", "Times that all cached blocks were forgotten on demand.", lambda s: s.prefix_resets
    ),
    MetricFamily(
        "quire:worker_losses", "Number of times that a worker died, hung or failed.", lambda s: s.worker_losses
    ),
)

UNTYPED = (
    MetricFamily("vllm:generation_token_count", "Tokens generated, without _total.", lambda s: s.generation_tokens),
)


class LabeledFamily(NamedTuple):
    """A metric with one sample per engine and value of another label."""

    name: str
    doc: str
    label: str
    values: Mapping[str, Callable[[Snapshot], float]]


LABELED_GAUGES = (
    LabeledFamily(
        "vllm:num_requests_waiting_by_reason",
        "Sequences waiting for KV memory (capacity) or for anything else (deferred).",
        "reason",
        {"capacity": lambda s: s.waiting - s.waiting_deferred, "deferred": lambda s: s.waiting_deferred},
    ),
)

LABELED_COUNTERS = (
    LabeledFamily(
        "vllm:prompt_tokens_by_source",
        "Prompt tokens, by the source of their KV.",
        "source",
        {
            "local_compute": lambda s: s.prompt_tokens - s.prompt_tokens_cached,
            "local_cache_hit": lambda s: s.prompt_tokens_cached,
        },
    ),
    LabeledFamily(
        "vllm:admission_rejections",
        "Requests refused because the queue was full, by the limit reached.",
        "reason",
        {
            "max_num_queued_reqs": lambda s: s.rejected_by_requests,
            "max_num_queued_tokens": lambda s: s.rejected_by_tokens,
        },
    ),
    LabeledFamily(
        "quire:sequences_finished",
        "Sequences that ended, by reason.",
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
    """Collects the metrics of the engines in `snapshots`, by name of engine. Any thread may call it."""

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
        for labeled in LABELED_GAUGES:
            yield _fill_labeled(GaugeMetricFamily, labeled, model, snapshots)
        for labeled in LABELED_COUNTERS:
            yield _fill_labeled(CounterMetricFamily, labeled, model, snapshots)
        yield _step_tokens(model, snapshots)
        yield _cache_config(model, snapshots)
        yield _lora_requests(model, snapshots)

    def describe(self) -> Iterable[Metric]:
        """Yield the metrics without samples, so that registration needs no engine."""
        return EngineCollector(model_name=str, snapshots=dict).collect()  # `str()` and `dict()` are empty


def registry(*collectors: Collector) -> CollectorRegistry:
    """Return a registry of `collectors` and the client library's own metrics of this process."""
    result = CollectorRegistry()
    for collector in (PROCESS_COLLECTOR, PLATFORM_COLLECTOR, GC_COLLECTOR, *collectors):
        result.register(collector)
    return result


def exposition(registry: CollectorRegistry) -> tuple[bytes, str]:
    """Return all metrics in the Prometheus text format, which every scraper takes, and the content type.

    It is never OpenMetrics, which Prometheus would prefer: there the client library writes `vllm_` for `vllm:` (0.26).
    """
    return generate_latest(registry), CONTENT_TYPE_PLAIN_0_0_4


def _fill(
    metric: GaugeMetricFamily | CounterMetricFamily | UnknownMetricFamily,
    value: Callable[[Snapshot], float],
    model: str,
    snapshots: Mapping[str, Snapshot],
) -> Metric:
    for engine, snapshot in snapshots.items():
        metric.add_metric((model, engine), value(snapshot))
    return metric


def _fill_labeled(
    metric_type: type[GaugeMetricFamily | CounterMetricFamily],
    family: LabeledFamily,
    model: str,
    snapshots: Mapping[str, Snapshot],
) -> Metric:
    metric = metric_type(family.name, family.doc, labels=(*LABELS, family.label))
    for engine, snapshot in snapshots.items():
        for label, value in family.values.items():
            metric.add_metric((model, engine, label), value(snapshot))
    return metric


def _step_tokens(model: str, snapshots: Mapping[str, Snapshot]) -> Metric:
    family = HistogramMetricFamily("vllm:iteration_tokens_total", "Tokens computed per step.", labels=LABELS)
    bounds = [*(str(float(bound)) for bound in STEP_TOKEN_BUCKETS), "+Inf"]
    for engine, snapshot in snapshots.items():
        counts = snapshot.step_tokens or [0] * len(bounds)
        buckets = list(zip(bounds, accumulate(counts), strict=False))
        family.add_metric((model, engine), buckets, snapshot.step_tokens_sum)
    return family


def _cache_config(model: str, snapshots: Mapping[str, Snapshot]) -> Metric:
    doc = "Always 1. Its labels are the layout of the KV memory, on any device."
    family = GaugeMetricFamily("vllm:cache_config_info", doc, labels=(*LABELS, *CACHE_LABELS))
    for engine, snapshot in snapshots.items():
        tokens = snapshot.blocks * snapshot.block_size
        longest = tokens / snapshot.max_model_len if snapshot.max_model_len else 0.0
        values = (snapshot.block_size, snapshot.blocks, snapshot.prefix_caching, tokens, f"{longest:.2f}")
        family.add_metric((model, engine, *map(str, values)), 1)
    return family


def _lora_requests(model: str, snapshots: Mapping[str, Snapshot]) -> Metric:
    doc = "The present time. Its labels are the adapters of running and waiting sequences, as lists with commas."
    family = GaugeMetricFamily("vllm:lora_requests_info", doc, labels=(*LABELS, *LORA_LABELS))
    for engine, snapshot in snapshots.items():
        if snapshot.max_loras:
            waiting, running = ",".join(snapshot.adapters_waiting), ",".join(snapshot.adapters_running)
            family.add_metric((model, engine, str(snapshot.max_loras), waiting, running), time.time())
    return family
