"""Prometheus figures of requests, as clients see them; those of engines come from `shared.metrics`.

Names and buckets are vLLM's where vLLM has the figure. Everything is counted once for each sample of each prompt,
when it ends, under one reason; so for any set of requests the counts agree with each other, whoever cut them off.
Refused requests are in none of them, only in quire:http_responses; those that left the queue before the engine had
reported their admission are not in the figures that begin with one.
"""

from collections.abc import Callable, Mapping, Sequence

from msgspec import Struct
from prometheus_client import Counter, Histogram

from shared.metrics import EngineCollector, exposition, registry
from shared.protocol import SchedulingInfo, Snapshot

LABELS = ("model_name", "engine")
TO_FIRST = (
    .001, .005, .01, .02, .04, .06, .08, .1, .25, .5, .75, 1, 2.5, 5, 7.5, 10, 20, 40, 80, 160, 640, 2560,
)  # fmt: skip
BETWEEN = (.01, .025, .05, .075, .1, .15, .2, .3, .4, .5, .75, 1, 2.5, 5, 7.5, 10, 20, 40, 80)  # fmt: skip
WHOLE = (.3, .5, .8, 1, 1.5, 2, 2.5, 5, 10, 15, 20, 30, 40, 50, 60, 120, 240, 480, 960, 1920, 7680)  # fmt: skip
TOKENS = tuple(digit * 10**power for power in range(6) for digit in (1, 2, 5))
SAMPLES = (1, 2, 5, 10, 20)
PREEMPTIONS = (1, 2, 3, 4, 5, 10, 20)


class Timing(Struct):
    """When things happened to one sample, in seconds of a monotonic clock; None: not yet."""

    arrived: float
    submitted: float = 0.0  # sent to the engine
    scheduling: SchedulingInfo | None = None  # the engine's last word on how it came to run
    first: float | None = None
    last: float | None = None


class EngineFigures:
    """The figures of the requests that one engine served, with their labels filled in."""

    def __init__(self, families: "_Families", labels: tuple[str, str]) -> None:
        self.finished = {
            reason: families.finished.labels(*labels, reason) for reason in ("stop", "length", "abort", "error")
        }
        self.to_first, self.between, self.per_token, self.whole, self.decode, self.prompt, self.output = (
            histogram.labels(*labels) for histogram in families.of_a_sample
        )
        self.queue, self.prefill, self.inference, self.preemptions = (
            histogram.labels(*labels) for histogram in families.of_an_admission
        )
        self.max_tokens, self.n, self.longest, self.computed = (
            histogram.labels(*labels) for histogram in families.of_a_request
        )

    def tokens(self, timing: Timing, count: int, now: float) -> None:
        """`count` tokens of a sample have come; those that come together are taken as evenly spaced."""
        if not count:
            return
        if timing.first is None or timing.last is None:
            timing.first = timing.last = now
            self.to_first.observe(now - timing.arrived)
            count -= 1
        for _ in range(count):
            self.between.observe((now - timing.last) / count)
        timing.last = now

    def sample_ended(self, timing: Timing, reason: str, prompt: int, output: int, now: float) -> None:
        """A sample of a prompt of `prompt` tokens ended with `output` of its own."""
        self.finished[reason].inc()
        self.whole.observe(now - timing.arrived)
        self.prompt.observe(prompt)
        self.output.observe(output)
        if timing.first is not None and timing.last is not None:
            self.decode.observe(timing.last - timing.first)
            if output > 1:
                self.per_token.observe((timing.last - timing.first) / (output - 1))
        if timing.scheduling is not None:
            self._admitted_sample_ended(timing, timing.scheduling, now)

    def _admitted_sample_ended(self, timing: Timing, scheduling: SchedulingInfo, now: float) -> None:
        """Split the sample's time where the engine admitted it, `queued` seconds after it was submitted."""
        admitted = timing.submitted + scheduling.queued_seconds
        self.queue.observe(scheduling.queued_seconds)
        self.preemptions.observe(scheduling.preemptions)
        self.inference.observe(max((timing.last or now) - admitted, 0.0))
        if timing.first is not None:
            self.prefill.observe(max(timing.first - admitted, 0.0))

    def prompt_ended(self, max_tokens: int, outputs: Sequence[int], computed: int | None) -> None:
        """All samples of a prompt ended, with so many tokens each. `computed`: of the prompt's own, None if cut off."""
        if computed is not None:
            self.computed.observe(computed)
        self.max_tokens.observe(max_tokens)
        self.n.observe(len(outputs))
        self.longest.observe(max(outputs))


class Metrics:
    """All of one gateway. `snapshots` gives the engines' states at the moment of a scrape."""

    def __init__(self, model_name: str, snapshots: Callable[[], Mapping[str, Snapshot]]) -> None:
        self._model_name = model_name
        self._families = _Families()
        self._engines: dict[str, EngineFigures] = {}
        self._registry = registry(EngineCollector(lambda: model_name, snapshots), *self._families.all)

    def engine(self, name: str) -> EngineFigures:
        """The figures of one engine."""
        known = self._engines.get(name)
        if known is None:
            known = self._engines[name] = EngineFigures(self._families, (self._model_name, name))
        return known

    def answered(self, handler: str, status: int) -> None:
        """An HTTP request was answered; 400s are counted here and nowhere else."""
        self._families.responses.labels(handler, str(status)).inc()

    def render(self) -> tuple[bytes, str]:
        """The exposition and its content type."""
        return exposition(self._registry)


class _Families:
    def __init__(self) -> None:
        self.finished = Counter(
            "vllm:request_success", "Samples that ended, by reason.", (*LABELS, "finished_reason"), registry=None
        )
        self.responses = Counter(
            "quire:http_responses", "Answers by handler and status.", ("handler", "code"), registry=None
        )
        self.of_a_sample = (
            _histogram("vllm:time_to_first_token_seconds", "From arrival to the first token.", TO_FIRST),
            _histogram("vllm:inter_token_latency_seconds", "Between two tokens of a sample.", BETWEEN),
            _histogram("vllm:request_time_per_output_token_seconds", "Mean of that, a sample.", BETWEEN),
            _histogram("vllm:e2e_request_latency_seconds", "From arrival to the end.", WHOLE),
            _histogram("vllm:request_decode_time_seconds", "From the first token to the last.", WHOLE),
            _histogram("vllm:request_prompt_tokens", "Tokens of the prompt.", TOKENS),
            _histogram("vllm:request_generation_tokens", "Tokens of the output.", TOKENS),
        )
        self.of_an_admission = (
            _histogram("vllm:request_queue_time_seconds", "From the engine's acceptance to the admission.", WHOLE),
            _histogram("vllm:request_prefill_time_seconds", "From the admission to the first token.", WHOLE),
            _histogram("vllm:request_inference_time_seconds", "From the admission to the last token.", WHOLE),
            _histogram("vllm:request_num_preemptions", "Times that a sample gave up its KV blocks.", PREEMPTIONS),
        )
        self.of_a_request = (
            _histogram("vllm:request_params_max_tokens", "max_tokens of a prompt, default included.", TOKENS),
            _histogram("vllm:request_params_n", "Samples of a prompt.", SAMPLES),
            _histogram("vllm:request_max_num_generation_tokens", "Tokens of a prompt's longest sample.", TOKENS),
            _histogram("vllm:request_prefill_kv_computed_tokens", "Tokens of a prompt not found in the cache.", TOKENS),
        )

    @property
    def all(self) -> tuple[Counter | Histogram, ...]:
        return (self.finished, self.responses, *self.of_a_sample, *self.of_an_admission, *self.of_a_request)


def _histogram(name: str, doc: str, buckets: Sequence[float]) -> Histogram:
    return Histogram(name, doc, LABELS, buckets=buckets, registry=None)
