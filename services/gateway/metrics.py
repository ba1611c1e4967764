"""Prometheus metrics of requests as clients see them. Those of engines come from `shared.metrics`.

Names and buckets are vLLM's if vLLM has the metric. A sample is counted once, when it ends, under one reason. So the
counts of a set of requests agree with each other, however the requests ended. Refused requests, and those whose clients
have left before an engine got them, are counted in quire:http_responses only. Metrics that start at a sample's
admission lack the samples that ended before the engine reported it.

A scrape of a port that several gateways share reaches any of them. So they keep their figures in files of one folder
(`SHARED_METRICS_VARIABLE`), and each shows the sum of all, those that have ended included.
"""

import os
from bisect import bisect_left
from collections.abc import Callable, Mapping, Sequence

from msgspec import Struct
from prometheus_client import Counter, Histogram, values
from prometheus_client.multiprocess import MultiProcessCollector
from prometheus_client.registry import Collector

from services.gateway.config import SHARED_METRICS_VARIABLE
from shared.metrics import DETECTION_BUCKETS, RECOVERY_BUCKETS, EngineCollector, exposition, registry
from shared.protocol import FinishReason, SchedulingInfo, Snapshot
from shared.text.repetition import FINISH_REASON as REPETITION
from shared.transport import DropReason

LABELS = ("model_name", "engine")
TTFT_BUCKETS = (
    .001, .005, .01, .02, .04, .06, .08, .1, .25, .5, .75, 1, 2.5, 5, 7.5, 10, 20, 40, 80, 160, 640, 2560,
)  # fmt: skip
ITL_BUCKETS = (.01, .025, .05, .075, .1, .15, .2, .3, .4, .5, .75, 1, 2.5, 5, 7.5, 10, 20, 40, 80)  # fmt: skip
TIME_BUCKETS = (.3, .5, .8, 1, 1.5, 2, 2.5, 5, 10, 15, 20, 30, 40, 50, 60, 120, 240, 480, 960, 1920, 7680)  # fmt: skip
TOKEN_BUCKETS = tuple(digit * 10**power for power in range(6) for digit in (1, 2, 5))
N_BUCKETS = (1, 2, 5, 10, 20)
FLUSH_INTERVAL = 0.25
"""Seconds after which figures of single tokens are shown at the latest, while more come; also by other gateways."""

PREEMPTION_BUCKETS = (1, 2, 3, 4, 5, 10, 20)


def continue_shared_figures(gateway: str) -> None:
    """Let metrics that are made from now on continue those of the last process of this name, if gateways share them.

    The client library would name the files after the process, and every restart would leave some behind.
    """
    if SHARED_METRICS_VARIABLE in os.environ:
        values.ValueClass = values.MultiProcessValue(lambda: gateway)  # type: ignore[no-untyped-call]


FINISH_REASONS = (*(reason.value for reason in FinishReason), REPETITION)


class SampleTimes(Struct):
    """The times of one sample's events, in seconds of the monotonic clock. None: not yet."""

    arrived: float
    submitted: float = 0.0  # to the engine
    scheduling: SchedulingInfo | None = None  # the last one that the engine sent
    first_token: float | None = None
    last_token: float | None = None


class EngineMetrics:
    """The metrics of the requests that one engine served, with their labels filled in."""

    def __init__(self, families: "_Families", labels: tuple[str, str]) -> None:
        self.finished = {reason: families.finished.labels(*labels, reason) for reason in FINISH_REASONS}
        (
            self.ttft,
            inter_token_latency,
            self.time_per_output_token,
            self.e2e_latency,
            self.decode_time,
            self.prompt_tokens,
            self.generation_tokens,
        ) = (histogram.labels(*labels) for histogram in families.of_samples)
        self._latencies = _TokenHistogram(inter_token_latency)
        self.recovery = families.recovery.labels(*labels)
        self.queue_time, self.prefill_time, self.inference_time, self.num_preemptions = (
            histogram.labels(*labels) for histogram in families.of_admitted_samples
        )
        self.max_tokens, self.n, self.max_generation_tokens, self.computed_tokens = (
            histogram.labels(*labels) for histogram in families.of_prompts
        )

    def record_tokens(self, times: SampleTimes, count: int, now: float) -> None:
        """Record that `count` tokens of a sample have come. The time since the last one is divided among them."""
        if not count:
            return
        if times.last_token is None:
            times.first_token = times.last_token = now
            self.ttft.observe(now - times.arrived)
            count -= 1
        if count:
            self._latencies.observe((now - times.last_token) / count, count, now)
        times.last_token = now

    def flush(self) -> None:
        """Have the library's metrics show everything that was recorded."""
        self._latencies.flush()

    def record_sample(self, times: SampleTimes, reason: str, num_prompt: int, num_output: int, now: float) -> None:
        """Record the end of a sample, with the number of tokens of its prompt and of its output."""
        self.flush()
        self.finished[reason].inc()
        self.e2e_latency.observe(now - times.arrived)
        self.prompt_tokens.observe(num_prompt)
        self.generation_tokens.observe(num_output)
        if times.first_token is not None and times.last_token is not None:
            self.decode_time.observe(times.last_token - times.first_token)
            if num_output > 1:
                self.time_per_output_token.observe((times.last_token - times.first_token) / (num_output - 1))
        if times.scheduling is not None:
            self._record_admitted_sample(times, times.scheduling, now)

    def _record_admitted_sample(self, times: SampleTimes, scheduling: SchedulingInfo, now: float) -> None:
        """Split the sample's time at its admission, which was `queued_seconds` after it was submitted."""
        admitted = times.submitted + scheduling.queued_seconds
        self.queue_time.observe(scheduling.queued_seconds)
        self.num_preemptions.observe(scheduling.preemptions)
        self.inference_time.observe(max((times.last_token or now) - admitted, 0.0))
        if times.first_token is not None:
            self.prefill_time.observe(max(times.first_token - admitted, 0.0))

    def record_prompt(self, max_tokens: int, num_outputs: Sequence[int], num_computed: int | None) -> None:
        """Record that all samples of a prompt have ended.

        `num_outputs` has the number of output tokens of each sample. `num_computed` is the number of prompt tokens that
        were not in the prefix cache, or None if the prompt ended before its first output.
        """
        if num_computed is not None:
            self.computed_tokens.observe(num_computed)
        self.max_tokens.observe(max_tokens)
        self.n.observe(len(num_outputs))
        self.max_generation_tokens.observe(max(num_outputs))


class EngineLosses:
    """Metrics of the engines that a gateway has lost, and of what they sent in vain. Each counts what it sees."""

    def __init__(self) -> None:
        self.resumed = Counter(
            "quire:resumed_requests",
            "Times that a request went on after its engine was lost or drained.",
            registry=None,
        )
        self.inexact = Counter(
            "quire:inexact_resumes",
            "Those with output that went on at an engine that may compute other tokens.",
            registry=None,
        )
        self.restarts = Counter(
            "quire:engine_restarts", "Times that an engine came back as another process.", ("engine",), registry=None
        )
        self.detection = Histogram(
            "quire:engine_detection_seconds",
            "Seconds from the last sign of life of an engine to its loss. A connection's end is one.",
            ("engine",),
            buckets=DETECTION_BUCKETS,
            registry=None,
        )

        self.dropped = Counter(
            "quire:dropped_messages",
            "Messages of engines that were dropped, or rows of them. A few of the reason unexpected are normal.",
            ("engine", "role", "reason"),
            registry=None,
        )

    def init_labels(self, engine: str) -> None:
        """Show zeros for an engine, so that the first loss or dropped message is seen as a growth."""
        self.restarts.labels(engine)
        self.detection.labels(engine)
        for reason in DropReason:
            self._dropped_of(engine, reason)

    def count_drop(self, engine: str, reason: DropReason) -> None:
        """Count a message of an engine that was dropped, or a row of one."""
        self._dropped_of(engine, reason).inc()

    @property
    def all(self) -> tuple[Counter | Histogram, ...]:
        """Return all metrics."""
        return (self.resumed, self.inexact, self.restarts, self.detection, self.dropped)

    def _dropped_of(self, engine: str, reason: DropReason) -> Counter:
        return self.dropped.labels(engine, "scheduler", reason.value)


class Metrics:
    """The metrics of one gateway.

    `snapshots` returns the current snapshots of the engines, by name; `others` are metrics that are counted elsewhere.
    """

    def __init__(
        self, model_name: str, snapshots: Callable[[], Mapping[str, Snapshot]], others: Sequence[Collector] = ()
    ) -> None:
        self._model_name = model_name
        self._families = _Families()
        self._engines: dict[str, EngineMetrics] = {}
        own: Sequence[Collector] = (*self._families.all, *others)
        if folder := os.environ.get(SHARED_METRICS_VARIABLE):
            own = [MultiProcessCollector(None, folder)]  # type: ignore[no-untyped-call]
        self._registry = registry(EngineCollector(lambda: model_name, snapshots), *own)

    def engine(self, name: str) -> EngineMetrics:
        """Return the metrics of one engine."""
        metrics = self._engines.get(name)
        if metrics is None:
            metrics = self._engines[name] = EngineMetrics(self._families, (self._model_name, name))
        return metrics

    def count_response(self, handler: str, status: int) -> None:
        """Count a response to an HTTP request. Refused requests are counted here only."""
        self._families.responses.labels(handler, str(status)).inc()

    def render(self) -> tuple[bytes, str]:
        """Return the metrics in Prometheus' text format, and its content type."""
        for engine in self._engines.values():
            engine.flush()
        return exposition(self._registry)


class _TokenHistogram:
    """Observes values for each token, and hands them on to a histogram of the library together, some times a second.

    The library takes as long for one as text and JSON of a token together. It has no public call that observes a value
    several times, and a collector of Quire's own would be left out of the sum over gateways that share a port. So this
    one adds to the library's private counts.
    """

    def __init__(self, histogram: Histogram) -> None:
        self._histogram = histogram
        self._bounds = histogram._upper_bounds
        self._counts = [0] * len(self._bounds)  # by bucket
        self._sum = 0.0
        self._flush_due = 0.0

    def observe(self, value: float, count: int, now: float) -> None:
        """Observe a value `count` times."""
        self._counts[bisect_left(self._bounds, value)] += count
        self._sum += value * count
        if now >= self._flush_due:
            self._flush_due = now + FLUSH_INTERVAL
            self.flush()

    def flush(self) -> None:
        """Hand on what was observed."""
        for bucket, count in zip(self._histogram._buckets, self._counts, strict=True):
            if count:
                bucket.inc(count)
        self._histogram._sum.inc(self._sum)
        self._counts, self._sum = [0] * len(self._bounds), 0.0


class _Families:
    def __init__(self) -> None:
        self.finished = Counter(
            "vllm:request_success", "Samples that ended, by reason.", (*LABELS, "finished_reason"), registry=None
        )
        self.responses = Counter(
            "quire:http_responses", "HTTP responses by handler and status.", ("handler", "code"), registry=None
        )
        self.recovery = _histogram(
            "quire:request_recovery_seconds",
            "Seconds from the loss of a request's engine to its next token.",
            RECOVERY_BUCKETS,
        )
        self.of_samples = (
            _histogram("vllm:time_to_first_token_seconds", "Seconds from arrival to the first token.", TTFT_BUCKETS),
            _histogram("vllm:inter_token_latency_seconds", "Seconds between two tokens of a sample.", ITL_BUCKETS),
            _histogram(
                "vllm:request_time_per_output_token_seconds",
                "Mean seconds per output token of a sample, after the first.",
                ITL_BUCKETS,
            ),
            _histogram(
                "vllm:e2e_request_latency_seconds", "Seconds from arrival to the end of a sample.", TIME_BUCKETS
            ),
            _histogram("vllm:request_decode_time_seconds", "Seconds from the first token to the last.", TIME_BUCKETS),
            _histogram("vllm:request_prompt_tokens", "Prompt tokens of a sample.", TOKEN_BUCKETS),
            _histogram("vllm:request_generation_tokens", "Output tokens of a sample.", TOKEN_BUCKETS),
        )
        self.of_admitted_samples = (
            _histogram(
                "vllm:request_queue_time_seconds",
                "Seconds of waiting for an engine and in its queue, until admission.",
                TIME_BUCKETS,
            ),
            _histogram("vllm:request_prefill_time_seconds", "Seconds from admission to the first token.", TIME_BUCKETS),
            _histogram(
                "vllm:request_inference_time_seconds", "Seconds from admission to the last token.", TIME_BUCKETS
            ),
            _histogram("vllm:request_num_preemptions", "Preemptions of a sample.", PREEMPTION_BUCKETS),
        )
        self.of_prompts = (
            _histogram("vllm:request_params_max_tokens", "max_tokens of a prompt, after defaults.", TOKEN_BUCKETS),
            _histogram("vllm:request_params_n", "Samples of a prompt.", N_BUCKETS),
            _histogram(
                "vllm:request_max_num_generation_tokens", "Output tokens of a prompt's longest sample.", TOKEN_BUCKETS
            ),
            _histogram(
                "vllm:request_prefill_kv_computed_tokens",
                "Prompt tokens that were not in the prefix cache.",
                TOKEN_BUCKETS,
            ),
        )

    @property
    def all(self) -> tuple[Counter | Histogram, ...]:
        return (
            self.finished,
            self.responses,
            self.recovery,
            *self.of_samples,
            *self.of_admitted_samples,
            *self.of_prompts,
        )


def _histogram(name: str, doc: str, buckets: Sequence[float]) -> Histogram:
    return Histogram(name, doc, LABELS, buckets=buckets, registry=None)
