"""A record as a page: how it stands with the targets, then every figure that they come from. Pure."""

from collections.abc import Iterator
from typing import NamedTuple

from benchmarks.peers.record import Record
from benchmarks.peers.workloads import LONG_TAIL, SHARED_PREFIX, STEADY, WORKLOADS

QUANTISED = ("quire", "quire-int8")
INSIDE = ("quire-inside", "quire-int8-inside")
OPENVINO = ("openvino-gguf", "openvino-int8")
LLAMA_CPP = ("llama.cpp-q4", "llama.cpp-q8")


class Target(NamedTuple):
    """Output tokens a second: the best of `ours` over the best of `theirs` shall be `least`."""

    against: str
    ours: tuple[str, ...]
    theirs: tuple[str, ...]
    workload: str
    least: float


def _steady(
    against: str, ours: tuple[str, ...], theirs: tuple[str, ...], least: tuple[float, float, float, float]
) -> Iterator[Target]:
    for workload, ratio in zip(STEADY, least, strict=True):
        yield Target(against, ours, theirs, workload.name, ratio)


TARGETS = (
    *_steady("vLLM CPU", ("quire-bf16",), ("vllm",), (2, 1.6, 1.6, 1.6)),
    *_steady("OpenVINO GenAI, both in process", INSIDE, OPENVINO, (1.3, 1.3, 1.2, 1.2)),
    *_steady("OpenVINO GenAI in process, we over HTTP", QUANTISED, OPENVINO, (1.3, 1.3, 1.2, 1.2)),
    *_steady("llama.cpp server", QUANTISED, LLAMA_CPP, (1.3, 2.5, 2.5, 2.5)),
    Target("transformers, static batches", ("quire-bf16-inside",), ("transformers",), LONG_TAIL.name, 7),
    Target("OpenVINO GenAI, both in process", INSIDE, OPENVINO, LONG_TAIL.name, 1.3),
    Target("vLLM CPU", ("quire-bf16",), ("vllm",), SHARED_PREFIX.name, 2),
)

# (ours, the precision of its weights, the ceilings of which the greatest binds its products)
BOUND = (
    ("quire-bf16", "bf16", ("float32", "bfloat16")),
    ("quire-int8", "int8", ("int8",)),
    ("quire", "4-bit", ("int8",)),
)
GEMM, READ = 0.6, 0.7  # of the ceilings

HEAD = """# Quire and its peers

On {record.date}, {record.machine}. The embedded model, SmolLM2-135M-Instruct; in turns, with

    {record.command}

Greedy, to exactly the length asked for, in a closed loop: a request begins when another has ended. Prompts are random
tokens, the same for all, new in each round. Figures are medians over the rounds, the spread being the greatest over the
least. Servers were asked by `{record.client}`, which shares their cores. What runs in process has no server, and was
driven without HTTP in between, which is its best case; so was our engine, to compare like with like.
"""

STARTS = """
## Starts

From the command to the first answer, of one token. Memory is that of all processes after the workloads, with shared
pages counted once.

| | precision | version | seconds, each round | memory, MB |
|---|---|---|---|---|"""


def page(record: Record) -> str:
    """Markdown."""
    return "\n".join([*_head(record), *_targets(record), *_machine(record), *_figures(record), *_starts(record)]) + "\n"


def _head(record: Record) -> Iterator[str]:
    yield "# Quire and its peers\n"
    yield HEAD.format(record=record)
    for key, reason in record.skipped.items():
        yield f"- **{key}** is missing: {reason}"
    for entry in {(one.title, one.note): one for one in record.peers.values() if one.note}.values():
        yield f"- **{entry.title}** ran {entry.note}."
    yield "\n![Throughput against concurrency](peers.svg)\n"


def _targets(record: Record) -> Iterator[str]:
    yield "## Ratios\n\nOutput tokens a second, ours over theirs. Where there are several, the best of each side.\n"
    yield "| against | workload | ours | theirs | ratio | target | |\n|---|---|---|---|---|---|---|"
    for target in TARGETS:
        ours, theirs = record.best(target.ours, target.workload), record.best(target.theirs, target.workload)
        if ours is None or theirs is None:
            continue
        ratio = ours[1] / theirs[1]
        cells = [f"{value:.0f} ({record.peers[peer].precision})" for peer, value in (ours, theirs)]
        verdict = "met" if ratio >= target.least else f"{1 - ratio / target.least:.0%} short"
        cells += [f"**{ratio:.2f}**", f"{target.least:g}", verdict]
        yield f"| {target.against} | {target.workload} | {' | '.join(cells)} |"


def _machine(record: Record) -> Iterator[str]:
    """Of decoding, by the median time between two tokens: what the products and the reading of weights come to."""
    yield "\n## The machine\n"
    names = list(next(iter(record.ceilings[0].values()))) if record.ceilings else []
    yield f"| threads | {' | '.join(names)} |\n|{'---|' * (len(names) + 1)}"
    for threads in record.ceilings[0] if record.ceilings else ():
        rows = [[one[threads][name] for one in record.ceilings] for name in names]
        yield f"| {threads} | {' | '.join(f'{min(row):.0f} to {max(row):.0f}' for row in rows)} |"
    yield "\nRead in GB/s, products in GFLOP/s or GOP/s (`benchmarks/ceilings.py`). What decoding makes of that, by the"
    yield "median time between two tokens, over HTTP:\n"
    yield "| | at a time | tok/s | | of the ceiling | target |\n|---|---|---|---|---|---|"
    for peer, precision, products in BOUND:
        for workload, concurrency in ((one.name, one.concurrency) for one in STEADY if one.concurrency != 8):
            itl = record.median(peer, workload, "itl")
            ceiling = record.ceiling("read") if concurrency == 1 else record.ceiling(*products)
            if not itl or not ceiling:
                continue
            rate = 1000 * concurrency / itl
            amount, unit = record.bytes[precision] * rate / concurrency / 1e9, "GB/s"
            if concurrency > 1:
                amount, unit = 2 * record.parameters * rate / 1e9, "G(FL)OP/s"
            yield (
                f"| {precision} | {concurrency} | {rate:.0f} | {amount:.0f} {unit} | {amount / ceiling:.0%} "
                f"| {READ if concurrency == 1 else GEMM:.0%} |"
            )


def _figures(record: Record) -> Iterator[str]:
    for workload in WORKLOADS:
        peers = [peer for peer in record.peers if record.values(peer, workload.name)]
        if not peers:
            continue
        yield f"\n## {workload.name}: {workload.title}\n"
        yield "| | precision | requests | output tok/s | spread | TTFT, ms | ITL, ms |\n|---|---|---|---|---|---|---|"
        for peer in peers:
            entry, rates = record.peers[peer], record.values(peer, workload.name)
            requests = next(
                one.requests for one in record.measured if (one.peer, one.workload) == (peer, workload.name)
            )
            times = [f"{record.median(peer, workload.name, figure) or 0:.0f}" for figure in ("ttft", "itl")]
            yield (
                f"| {entry.title} | {entry.precision} | {requests} | {record.median(peer, workload.name):.1f} "
                f"| {max(rates) / min(rates):.2f} | {' | '.join(times)} |"
            )


def _starts(record: Record) -> Iterator[str]:
    yield STARTS
    for key, entry in record.peers.items():
        found = [one for one in record.started if one.peer == key]
        if found:
            seconds = ", ".join(f"{one.seconds:.1f}" for one in found)
            memory = max(one.memory for one in found)
            yield f"| {entry.title} | {entry.precision} | {entry.version} | {seconds} | {memory:.0f} |"
