"""Rows of the table: one for each check, sent as soon as it is known."""

import sys
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import NamedTuple

YES, MISSED, WRONG, FAILED = "yes", "missed", "WRONG", "FAILED"
"""What `Row.ok` can be. A missed target is a matter of speed. WRONG and FAILED make the exit status 1."""

NONE = "-"
MAX_TRACEBACK = 3000  # characters on stderr, so that the table is not lost among them
HEADINGS = ("check", "measured", "floor or torch's", "share", "target", "ok")


class Row(NamedTuple):
    """A line of the table. Fields stand in the order of the headings; "-" is what was not measured or has no target."""

    check: str
    measured: str
    reference: str = NONE  # the least time that the hardware needs, the highest rate that it allows, or torch's
    share: str = NONE  # how much of the reference is reached
    target: str = NONE
    ok: str = NONE

    def __str__(self) -> str:
        return line(self)


class Note(NamedTuple):
    """A line below the table."""

    text: str


Message = Row | Note


def line(cells: tuple[str, ...]) -> str:
    """Return a line of a Markdown table."""
    return f"| {' | '.join(cell.replace('|', '/') for cell in cells)} |"


class Report:
    """Sends the rows of one part, and turns exceptions into rows."""

    def __init__(self, send: Callable[[Message], object]) -> None:
        self.add = send

    @contextmanager
    def check(self, name: str) -> Iterator[None]:
        """Let an exception in the block be a row, after which the part goes on."""
        try:
            yield
        except Exception as error:
            print(traceback.format_exc(limit=-4)[:MAX_TRACEBACK], file=sys.stderr)
            first_line = f"{type(error).__name__}: {error}".splitlines()[0]
            self.add(Row(name, first_line[:300], ok=FAILED))

    def note(self, text: str) -> None:
        self.add(Note(text))


def compare_times(
    check: str, seconds: float, reference: float | None, *, at_least: float | None = None, correct: bool | None = None
) -> Row:
    """Return the row of a time beside a shorter or torch's one.

    `at_least` is the share that is aimed at; `correct` says whether the result is right, if it was looked at.
    """
    share = reference / seconds if reference else None
    return _row(check, time_text(seconds), time_text(reference) if reference else NONE, share, at_least, correct)


def compare_rates(
    check: str,
    rate: float,
    reference: float | None,
    unit: str,
    *,
    at_least: float | None = None,
    correct: bool | None = None,
) -> Row:
    """Return the row of a rate beside a higher one."""
    share = rate / reference if reference else None
    text = f"{reference:,.0f} {unit}" if reference else NONE
    return _row(check, f"{rate:,.0f} {unit}", text, share, at_least, correct)


def count_equal(check: str, equal: int, total: int, unit: str) -> Row:
    """Return the row of a comparison that must find everything equal."""
    return Row(check, f"{equal} of {total} {unit} equal", target="all", ok=YES if equal == total > 0 else WRONG)


def time_text(seconds: float) -> str:
    """Return a time in the unit that suits it, with three digits."""
    for factor, unit in ((1.0, "s"), (1e3, "ms")):
        if seconds * factor >= 1:
            return f"{seconds * factor:.3g} {unit}"
    return f"{seconds * 1e6:.3g} µs"


def _row(
    check: str, measured: str, reference: str, share: float | None, at_least: float | None, correct: bool | None
) -> Row:
    ok = NONE if correct is None else YES
    if at_least is not None and share is not None:
        ok = YES if share >= at_least else MISSED
    if correct is False:
        ok = WRONG
    return Row(
        check,
        measured,
        reference,
        NONE if share is None else f"{share:.0%}",
        NONE if at_least is None or share is None else f"≥ {at_least:.0%}",
        ok,
    )
