"""Lists what Quire is to reach beside its peers, and beside itself. No I/O."""

from collections.abc import Iterator
from typing import NamedTuple

from benchmarks.peers.models import MIDDLE, SMALL
from benchmarks.peers.record import Record

Keys = tuple[str, ...]
"""Participants, by their keys in the roster; the best of them counts."""

FIGURES = {"output_throughput": "tok/s", "input_throughput": "prompt tok/s", "ttft": "first token, ms"}
"""What is compared, and in which unit. Of the last, less is better."""

BF16 = ("quire-bf16",)
DEFAULT, INT8, INT4 = ("quire",), ("quire-int8-kv8",), ("quire-int4-kv8",)
FOUR, EIGHT_OR_FOUR = ("quire-kv8",), ("quire-kv8", "quire-int8-kv8")  # of the embedded model
QUANTISED = (*INT4, *INT8)
VLLM, VLLM_INT8 = ("vllm",), ("vllm-w8a8",)


class Target(NamedTuple):
    """A target: a figure of the best of `ours`, divided by that of the best of `theirs`, and its bound.

    The bound is the least ratio, or the greatest if less is better.
    """

    against: str
    model: str
    workload: str
    ours: Keys
    theirs: Keys
    bound: float
    figure: str = "output_throughput"
    quick: bool = True  # `--quick` measures what it needs

    @property
    def falls(self) -> bool:
        """Return whether less is better."""
        return self.figure == "ttft"

    def best(self, record: Record, peers: Keys) -> tuple[float, str] | None:
        """Return the best figure of these participants, and whose it is; None if none was measured."""
        values = [(record.median(self.model, peer, self.workload, self.figure), peer) for peer in peers]
        known = [(value, peer) for value, peer in values if value is not None]
        return (min(known) if self.falls else max(known)) if known else None

    def verdict(self, ratio: float) -> str:
        """Return `met`, or by which share of the bound the ratio misses it."""
        if ratio <= self.bound if self.falls else ratio >= self.bound:
            return "met"
        return f"{ratio / self.bound - 1:.0%} over" if self.falls else f"{1 - ratio / self.bound:.0%} short"


class At(NamedTuple):
    """A model, and workloads with the bound of each."""

    model: str
    bounds: dict[str, float]


def _steady(model: str, *bounds: float) -> At:
    return At(model, {f"steady-{load}": bound for load, bound in zip((1, 8, 32, 64), bounds, strict=False)})


def _targets(
    against: str, at: At, ours: Keys, theirs: Keys, figure: str = "output_throughput", quick: bool = True
) -> Iterator[Target]:
    for workload, bound in at.bounds.items():
        yield Target(against, at.model, workload, ours, theirs, bound, figure, quick)


def _vllm_int8() -> Iterator[Target]:
    title = "vLLM W8A8"
    yield from _targets(title, _steady(MIDDLE.key, 2, 2, 1.8), QUANTISED, VLLM_INT8)
    yield from _targets(title, _steady(SMALL.key, 2.5, 2.5, 2.5), EIGHT_OR_FOUR, VLLM_INT8)
    yield Target(title, MIDDLE.key, "prompts", QUANTISED, VLLM_INT8, 1.4, "input_throughput")
    for model, defaults in ((SMALL.key, DEFAULT), (MIDDLE.key, ("quire-int4",))):
        for ours in (defaults, INT8):
            yield from _targets(title, At(model, {"long-1": 1.5, "long-4": 1.5}), ours, VLLM_INT8)
            yield Target(title, model, "long-1", ours, VLLM_INT8, 0.7, "ttft")


def _openvino() -> Iterator[Target]:
    for precision, served in (("int8", INT8), ("int4", INT4)):
        title, inside = f"OpenVINO GenAI {precision}", (f"{served[0]}-inside",)
        theirs, at = (f"openvino-{precision}",), _steady(MIDDLE.key, 1.2, 1.2, 1.2)
        yield from _targets(f"{title}, both in process", at, inside, theirs)
        yield from _targets(f"{title}, both in process", _steady(MIDDLE.key, 1, 1, 1), inside, theirs, "ttft")
        yield from _targets(f"{title} in process, we over HTTP", at, served, theirs)


def _llama_cpp() -> Iterator[Target]:
    for theirs, ours in (("q4", INT4), ("q8", INT8)):
        at = _steady(MIDDLE.key, 1.3, 2)
        yield from _targets(f"llama.cpp {theirs.upper()}_0", at, ours, (f"llama.cpp-{theirs}",))


def _ourselves() -> Iterator[Target]:
    title = "our own 8 bits, we with 4"
    for at, four in ((_steady(SMALL.key, 1, 1, 1), FOUR), (_steady(MIDDLE.key, 1, 1, 1), INT4)):
        yield from _targets(title, at, four, INT8)
        yield from _targets(title, At(at.model, {"long-1": 1, "long-4": 1}), four, INT8)
    yield Target(title, MIDDLE.key, "prompts", INT4, INT8, 1, "input_throughput")
    at = _steady(SMALL.key, 0.9, 0.95, 0.97)
    yield from _targets("our own engine in process, we over HTTP", at, FOUR, (f"{FOUR[0]}-inside",))


def _small_model() -> Iterator[Target]:
    """Yield the targets for the embedded model against peers whose figures `--quick` leaves out."""
    small, openvino = SMALL.key, ("openvino-gguf", "openvino-int8")
    served = ("quire", "quire-kv8", "quire-int8", "quire-int8-kv8")
    inside = tuple(f"{peer}-inside" for peer in served)
    both, one = "OpenVINO GenAI, both in process", "OpenVINO GenAI in process, we over HTTP"
    steady = _steady(small, 1.3, 1.3, 1.2, 1.2)
    yield from _targets("vLLM bf16", _steady(small, 2, 1.6, 1.6, 1.6), BF16, VLLM, quick=False)
    yield from _targets(both, steady, inside, openvino, quick=False)
    yield from _targets(one, steady, served, openvino, quick=False)
    llama_cpp = ("llama.cpp-q4", "llama.cpp-q8")
    yield from _targets("llama.cpp", _steady(small, 1.3, 2.5, 2.5, 2.5), served, llama_cpp, quick=False)
    tail = At(small, {"long-tail": 7})
    yield from _targets("transformers, static batches", tail, ("quire-bf16-inside",), ("transformers",), quick=False)
    yield from _targets(both, At(small, {"long-tail": 1.3}), inside, openvino, quick=False)
    yield from _targets("vLLM bf16", At(small, {"shared-prefix": 2}), BF16, VLLM, quick=False)


TARGETS = (*_vllm_int8(), *_openvino(), *_llama_cpp(), *_ourselves(), *_small_model())


class Share(NamedTuple):
    """Which share of the machine's ceiling a participant is to reach, with weights of a precision."""

    model: str
    peer: str
    precision: str
    ceilings: Keys  # of products, of which the greatest counts


PRODUCTS_OF_FLOATS = ("float32", "bfloat16")
PRODUCTS = (*PRODUCTS_OF_FLOATS, "int8")  # on AVX2 alone torch is faster with floats than with bytes
SHARES = (
    Share(SMALL.key, "quire-bf16", "bf16", PRODUCTS_OF_FLOATS),
    Share(SMALL.key, "quire-int8-kv8", "int8", PRODUCTS),
    Share(SMALL.key, "quire-kv8", "4-bit", PRODUCTS),
    Share(MIDDLE.key, "quire-int8-kv8", "int8", PRODUCTS),
    Share(MIDDLE.key, "quire-int4-kv8", "int4", PRODUCTS),
)
PROMPT_SHARE, DECODE_SHARE = 0.65, 0.75  # of the products' ceiling, and of what can be read


def needed(model: str, peer: str) -> frozenset[str]:
    """Return the names of the workloads that `--quick` measures: those in which a target of its compares this peer."""
    return frozenset(
        target.workload
        for target in TARGETS
        if target.quick and target.model == model and peer in (*target.ours, *target.theirs)
    )
