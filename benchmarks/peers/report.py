"""Writes a record as a page: the targets, then all figures behind them. No I/O."""

import statistics
from collections.abc import Iterator
from typing import NamedTuple

from benchmarks.ceilings import UNITS
from benchmarks.peers.record import Record
from benchmarks.peers.workloads import LONG_TAIL, SHARED_PREFIX, STEADY, WORKLOADS

QUANTISED = ("quire", "quire-kv8", "quire-int8")
INSIDE = ("quire-inside", "quire-kv8-inside", "quire-int8-inside")
OPENVINO = ("openvino-gguf", "openvino-int8")
LLAMA_CPP = ("llama.cpp-q4", "llama.cpp-q8")


class Target(NamedTuple):
    """A target: the best of `ours` makes at least `least` times the output tokens a second of the best of `theirs`."""

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

CEILINGS = """
## The machine

The most that it did with torch, the least and the greatest of the rounds (`benchmarks/ceilings.py`).
"""

DECODING = """
What decoding makes of that over HTTP, by the median time between two tokens: alone, each weight is read once a token;
of many rows, each weight is two operations a row. Attention is not counted.

| weights | rows | tok/s | | of the ceiling | target |
|---|---|---|---|---|---|"""

STARTS = """
## Starts

From the command to the first answer, of one token. Memory is that of all processes after the workloads, with shared
pages counted once.

| | precision | version | seconds, each round | memory, MB |
|---|---|---|---|---|"""


def page(record: Record) -> str:
    """Return the page as Markdown."""
    parts = (_head, _targets, _ceilings, _decoding, _figures, _starts)
    return "\n".join(line for part in parts for line in part(record)) + "\n"


def _head(record: Record) -> Iterator[str]:
    yield HEAD.format(record=record)
    for key, reason in record.skipped.items():
        yield f"- **{key}**: {reason}"
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


def _ceilings(record: Record) -> Iterator[str]:
    names = list(UNITS)
    yield CEILINGS
    yield f"| threads | {' | '.join(f'{name}, {unit}' for name, unit in UNITS.items())} |\n|{'---|' * (len(names) + 1)}"
    for threads in record.ceilings[0] if record.ceilings else ():
        columns = [[one[threads][name] for one in record.ceilings] for name in names]
        yield f"| {threads} | {' | '.join(f'{min(column):.0f} to {max(column):.0f}' for column in columns)} |"


def _decoding(record: Record) -> Iterator[str]:
    yield DECODING
    for peer, precision, products in BOUND:
        for workload in (STEADY[0], STEADY[2], STEADY[3]):
            itl, alone = record.median(peer, workload.name, "itl"), workload.concurrency == 1
            ceiling = record.ceiling("read") if alone else record.ceiling(*products)
            if not itl or not ceiling:
                continue
            rows = min(workload.concurrency, record.requests(peer, workload.name))
            amount = (record.bytes[precision] if alone else 2 * record.parameters * rows) / itl / 1e6
            cells = [
                precision,
                f"{rows}",
                f"{1000 * rows / itl:.0f}",
                f"{amount:.0f} {'GB/s' if alone else 'G(FL)OP/s'}",
            ]
            yield f"| {' | '.join(cells)} | {amount / ceiling:.0%} | {READ if alone else GEMM:.0%} |"


def _figures(record: Record) -> Iterator[str]:
    for workload in WORKLOADS:
        peers = [peer for peer in record.peers if record.values(peer, workload.name)]
        if not peers:
            continue
        yield f"\n## {workload.name}: {workload.title}\n"
        yield "| | precision | requests | output tok/s | spread | TTFT, ms | ITL, ms |\n|---|---|---|---|---|---|---|"
        for peer in peers:
            entry, rates = record.peers[peer], record.values(peer, workload.name)
            cells = [entry.title, entry.precision, f"{record.requests(peer, workload.name)}"]
            cells += [f"{statistics.median(rates):.1f}", f"{max(rates) / min(rates):.2f}"]
            cells += [f"{record.median(peer, workload.name, figure) or 0:.0f}" for figure in ("ttft", "itl")]
            yield f"| {' | '.join(cells)} |"


def _starts(record: Record) -> Iterator[str]:
    yield STARTS
    for key, entry in record.peers.items():
        starts = [one for one in record.started if one.peer == key]
        if starts:
            seconds = ", ".join(f"{one.seconds:.1f}" for one in starts)
            memory = max(one.memory for one in starts)
            yield f"| {entry.title} | {entry.precision} | {entry.version} | {seconds} | {memory:.0f} |"
