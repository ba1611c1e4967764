"""Writes a record as a page: the targets, then all figures behind them. No I/O."""

import statistics
from collections.abc import Iterator

from benchmarks.ceilings import UNITS
from benchmarks.peers.record import Record
from benchmarks.peers.targets import DECODE_SHARE, FIGURES, PROMPT_SHARE, SHARES, TARGETS, Share
from benchmarks.peers.workloads import WORKLOADS, Workload, steady

HEAD = """# Quire and its peers

On {record.date}, {record.machine}; in turns, with

{commands}

Greedy, to exactly the length asked for, in a closed loop: a request begins when another has ended. Prompts are random
tokens, the same for all, new in each round. Figures are medians over the rounds; the spread is the highest over the
lowest. Programs that run in process were driven without HTTP, which is their best case. Our engine was measured in
process too, to compare like with like.

- Servers were asked by `{clients}`, which shares their cores.
{models}"""

RATIOS = """## Ratios

Ours over theirs. Where there are several, the best of each side. Of times to first tokens, less is better.

| against | model | workload | | ours | theirs | ratio | target | |
|---|---|---|---|---|---|---|---|---|"""

CEILINGS = """
## The machine

What torch reached here at most: the lowest and the highest of the rounds (`benchmarks/ceilings.py`).
"""

PRODUCTS = """
What we make of that over HTTP. Of prompts, 512 tokens long and 8 at a time, each weight of the layers is two operations
a token, of whole requests' time. Decoding goes by the median time between two tokens: alone, each weight is read once a
token; of many rows, each weight is two operations a row. Attention is not counted, nor are scales of weights, except
those in the GGUF file's 4 bits.

| model | weights | | tok/s | | of the ceiling | target |
|---|---|---|---|---|---|---|"""

STARTS = """
## Starts

From the command to the first answer, of one token. Memory is that of all processes after the workloads, with shared
pages counted once. The last column is what others used of the CPUs in the second before: above a few per cent, figures
are too low.

| model | | precision | version | seconds, each round | memory, MB | CPUs in use, % |
|---|---|---|---|---|---|---|"""


def page(record: Record) -> str:
    """Return the page as Markdown."""
    parts = (_head, _targets, _ceilings, _products, _figures, _starts)
    return "\n".join(line for part in parts for line in part(record)) + "\n"


def _head(record: Record) -> Iterator[str]:
    models = "\n".join(f"- **{key}** is {weights.title}." for key, weights in record.models.items())
    commands = "\n".join(f"    {command}" for command in record.commands)
    yield HEAD.format(record=record, models=models, commands=commands, clients="` and `".join(record.clients))
    for key, reason in record.skipped.items():
        yield f"- **{key}**: {reason}"
    for entry in {(one.title, one.note): one for one in record.peers.values() if one.note}.values():
        yield f"- **{entry.title}** ran {entry.note}."
    yield "\n![Throughput against concurrency](peers.svg)\n"


def _targets(record: Record) -> Iterator[str]:
    yield RATIOS
    for target in TARGETS:
        ours, theirs = target.best(record, target.ours), target.best(record, target.theirs)
        if ours is None or theirs is None:
            continue
        ratio = ours[0] / theirs[0]
        cells = [target.against, target.model, target.workload, FIGURES[target.figure]]
        cells += [f"{value:.3g} ({record.peers[peer].precision})" for value, peer in (ours, theirs)]
        cells += [f"**{ratio:.2f}**", f"{'≤' if target.falls else '≥'} {target.bound:g}", target.verdict(ratio)]
        yield _row(cells)


def _ceilings(record: Record) -> Iterator[str]:
    names = list(UNITS)
    yield CEILINGS
    yield f"| threads | {' | '.join(f'{name}, {unit}' for name, unit in UNITS.items())} |\n|{'---|' * (len(names) + 1)}"
    for threads in record.ceilings[0] if record.ceilings else ():
        columns = [[one[threads][name] for one in record.ceilings] for name in names]
        yield _row([threads, *(f"{min(column):.0f} to {max(column):.0f}" for column in columns)])


def _products(record: Record) -> Iterator[str]:
    yield PRODUCTS
    for share in SHARES:
        for workload in WORKLOADS[share.model]:
            if workload.name == "prompts":
                yield from _prompts(record, share, workload)
            elif workload in steady(share.model):
                yield from _decoding(record, share, workload)


def _prompts(record: Record, share: Share, workload: Workload) -> Iterator[str]:
    rate = record.median(share.model, share.peer, workload.name, "input_throughput")
    ceiling = record.ceiling(*share.ceilings)
    if rate and ceiling:
        done = 2 * record.models[share.model].layers * rate / 1e9
        cells = [share.model, share.precision, "prompts", f"{rate:.0f}", f"{done:.0f} G(FL)OP/s"]
        yield _row([*cells, f"{done / ceiling:.0%}", f"{PROMPT_SHARE:.0%}"])


def _decoding(record: Record, share: Share, workload: Workload) -> Iterator[str]:
    itl, alone = record.median(share.model, share.peer, workload.name, "itl"), workload.concurrency == 1
    ceiling = record.ceiling("read") if alone else record.ceiling(*share.ceilings)
    if not itl or not ceiling:
        return
    weights = record.models[share.model]
    rows = min(workload.concurrency, record.requests(share.model, share.peer, workload.name))
    done = (weights.bytes[share.precision] if alone else 2 * (weights.layers + weights.head) * rows) / itl / 1e6
    cells = [share.model, share.precision, f"{rows} row{'s' * (rows > 1)}", f"{1000 * rows / itl:.0f}"]
    cells += [f"{done:.0f} {'GB/s' if alone else 'G(FL)OP/s'}", f"{done / ceiling:.0%}"]
    yield _row([*cells, f"{DECODE_SHARE:.0%}" if alone else ""])


def _figures(record: Record) -> Iterator[str]:
    for model in record.models:
        for workload in WORKLOADS[model]:
            peers = [peer for peer in record.peers if record.values(model, peer, workload.name)]
            if not peers:
                continue
            yield f"\n## {model}, {workload.name}: {workload.title}\n"
            yield "| | precision | requests | output tok/s | spread | prompt tok/s | TTFT, ms | ITL, ms | ITL p99, ms |"
            yield f"|{'---|' * 9}"
            for peer in peers:
                yield _row(_cells(record, model, peer, workload.name))


def _cells(record: Record, model: str, peer: str, workload: str) -> list[str]:
    entry, rates = record.peers[peer], record.values(model, peer, workload)
    cells = [entry.title, entry.precision, f"{record.requests(model, peer, workload)}"]
    cells += [f"{statistics.median(rates):.1f}", f"{max(rates) / min(rates):.2f}"]
    figures = ("input_throughput", "ttft", "itl", "itl_p99")
    return cells + [f"{record.median(model, peer, workload, figure) or 0:.0f}" for figure in figures]


def _starts(record: Record) -> Iterator[str]:
    yield STARTS
    for model in record.models:
        for key, entry in record.peers.items():
            starts = [one for one in record.started if (one.model, one.peer) == (model, key)]
            if starts:
                seconds = ", ".join(f"{one.seconds:.1f}" for one in starts)
                memory = max(one.memory for one in starts)
                used = ", ".join(f"{one.busy:.0f}" for one in starts)
                yield _row([model, entry.title, entry.precision, entry.version, seconds, f"{memory:.0f}", used])


def _row(cells: list[str]) -> str:
    return f"| {' | '.join(cells)} |"
