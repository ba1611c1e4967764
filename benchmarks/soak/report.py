"""What a soak has measured, its page of tables, and what of it is a failure."""

import os
import statistics
from collections.abc import Iterable, Mapping, Sequence
from itertools import product
from typing import NamedTuple

from msgspec import Struct

from benchmarks.soak.faults import SIGNALS, Fault
from benchmarks.soak.processes import ProcessHistory, Sample
from benchmarks.soak.tally import Pause, Tally

MIB = 2**20
MAX_GROWTH = 2 * MIB
"""Bytes a minute by which the memory of a process may grow once it is warm."""

MAX_SHOWN = 20  # lost streams in the page


class Remains(NamedTuple):
    """What a server at rest holds, and whether all its engines are ready."""

    whole: bool
    running: int
    waiting: int
    blocks: int


class Measurement(Struct, kw_only=True):
    """What was seen in one soak. `before` and `after` are the idle server's processes by name."""

    seconds: float  # until the last stream had ended
    clients: int
    tally: Tally
    faults: list[Fault]
    histories: list[ProcessHistory]
    before: dict[str, Sample]
    after: dict[str, Sample]
    left: Remains
    new_files: list[str]  # in the server's folder
    tracebacks: int  # in its log
    exit_status: int = 0


def failures(seen: Measurement) -> list[str]:
    """Return what was lost or leaked, a line each; empty if nothing was."""
    left = seen.left
    wrong = [f"a stream was lost: {reason}" for reason in seen.tally.lost]
    checks = {
        "no stream has ended": not seen.tally.ended,
        "not every engine is ready at the end": not left.whole,
        f"{left.running} sequences run and {left.waiting} wait at the end": bool(left.running or left.waiting),
        f"{left.blocks} blocks are not free at the end": bool(left.blocks),
        f"files are left: {', '.join(seen.new_files)}": bool(seen.new_files),
        f"{seen.tracebacks} tracebacks in the log": bool(seen.tracebacks),
        f"the server's exit status is {seen.exit_status}": bool(seen.exit_status),
    }
    wrong += [line for line, holds in checks.items() if holds]
    wrong += [f"{one.name} was {one.kind} and not replaced" for one in seen.faults if one.replaced is None]
    for name, now in seen.after.items():
        if now.descriptors > (allowed := _descriptors(seen.before, name)):
            wrong.append(f"{name} has {now.descriptors} file descriptors at rest; there were {allowed} before")
    for history in seen.histories:
        if (growth := history.growth()) is not None and growth > MAX_GROWTH:
            wrong.append(f"{history.name} (process {history.pid}) grew by {growth / MIB:.1f} MiB a minute")
    return wrong


def _descriptors(before: Mapping[str, Sample], name: str) -> int:
    """Return the most that a process of this role had before the soak."""
    role = name.split()[0]
    return max(sample.descriptors for other, sample in before.items() if other.split()[0] == role)


def page(seen: Measurement, command: str) -> str:
    """Return the page in Markdown."""
    parts = [
        "# What is lost under overload while processes are killed",
        f"`{command}`, on {os.cpu_count()} cores, with the embedded model. The machine's load average was "
        f"{os.getloadavg()[2]:.0f} at the end.",
        _streams(seen),
        "## Faults",
        "Pauses are those of streams which had begun, while their clients were reading, around such a fault.",
        _faults(seen),
        "## Processes",
        "Before the first fault and after the last one, with nothing to do. A process that was replaced counts anew; "
        "growth is the largest of any process of that name that lived for five minutes, a minute, after its first two.",
        _processes(seen),
    ]
    if wrong := failures(seen):
        parts += ["## Failures", "\n".join(f"- {line[:500]}" for line in wrong[:MAX_SHOWN])]
    return "\n\n".join(parts) + "\n"


def _streams(seen: Measurement) -> str:
    tally, left = seen.tally, seen.left
    rows = [
        ("minutes until the last stream ended", f"{seen.seconds / 60:.1f}"),
        ("clients", seen.clients),
        ("tokens served", f"{tally.tokens} ({tally.tokens / seen.seconds:.0f} a second)"),
        ("streams that ended as undisturbed ones", tally.ended),
        ("streams that stalled for seconds", tally.stalled),
        ("streams left in the middle, of which some came back", f"{tally.left}, {tally.came_back}"),
        ("attempts refused with status 429, and tried again", tally.refused),
        ("attempts that a gateway's death broke, and tried again", tally.broken),
        ("**streams lost**", f"**{len(tally.lost)}**"),
        ("faults", len(seen.faults)),
        ("longest pause of a stream, s", _longest(tally.pauses)),
        ("sequences that run or wait at the end", left.running + left.waiting),
        ("blocks not free at the end", left.blocks),
        ("files left in the server's folder", len(seen.new_files)),
    ]
    return _table(("figure", "value"), rows)


def _faults(seen: Measurement) -> str:
    def row(role: str, kind: str) -> tuple[object, ...]:
        faults = [fault for fault in seen.faults if (fault.role, fault.kind) == (role, kind)]
        replaced = [fault.replaced - fault.began for fault in faults if fault.replaced is not None]
        around = [
            pause for pause in seen.tally.pauses if any(pause.began <= one.began <= pause.ended for one in faults)
        ]
        return (
            f"{role} {kind}",
            len(faults),
            f"{max(replaced):.1f}" if replaced else "-",
            _median(around),
            _longest(around),
        )

    roles = sorted({fault.role for fault in seen.faults})
    rows = [row(role, kind) for role, kind in product(roles, sorted(SIGNALS))]
    return _table(("fault", "times", "replaced within, s", "median pause, s", "longest"), rows)


def _processes(seen: Measurement) -> str:
    def row(name: str) -> tuple[object, ...]:
        lives = [history for history in seen.histories if history.name == name]
        growths = [growth for history in lives if (growth := history.growth()) is not None]
        before, after = seen.before[name], seen.after[name]
        return (
            name,
            len(lives),
            f"{before.resident / MIB:.0f}",
            f"{after.resident / MIB:.0f}",
            f"{max(growths) / MIB:.2f}" if growths else "-",
            before.descriptors,
            after.descriptors,
        )

    headings = ("process", "lives", "MiB before", "MiB after", "growth, MiB", "descriptors before", "after")
    return _table(headings, (row(name) for name in seen.before if name in seen.after))


def _longest(pauses: Iterable[Pause]) -> str:
    longest = max((pause.ended - pause.began for pause in pauses), default=None)
    return "-" if longest is None else f"{longest:.1f}"


def _median(pauses: Iterable[Pause]) -> str:
    lengths = [pause.ended - pause.began for pause in pauses]
    return f"{statistics.median(lengths):.1f}" if lengths else "-"


def _table(headings: Sequence[str], rows: Iterable[Sequence[object]]) -> str:
    lines = [headings, ["---"] * len(headings), *rows]
    return "\n".join(f"| {' | '.join(map(str, cells))} |" for cells in lines)
