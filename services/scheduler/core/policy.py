"""The order of sequences, and how a step's budget is split among them.

One static key orders everything; lower is served first. Under `fcfs` it is the arrival. Under `priority` it is
arrival + priority × ageing, so a request of any priority is served in time; without ageing it is (priority, arrival),
which is strict and may starve. Ties go by the order of submission, then by sample. Since the key of a sequence never
changes, two of them cannot preempt each other in turn.

A user's request of many samples (prompts times n) takes turns with others: each of its samples counts as arriving a
little later than the one before, so that `max_num_seqs` samples span `REQUEST_SPAN` seconds. Samples of other requests
come between, and may preempt those of its samples that run beyond half the slots. The place of each sample is fixed, so
it waits only for those before it.

A step's budget goes first to sequences that continue their output, one position each. The rest is for longer chunks
(of prompts, and of outputs that are computed again), in order: each takes half of what is left, but no less than a
block, and the rest goes to the first in order. So a long prompt gets the larger part of each step and later ones never
stop it, while a short prompt behind it is computed within a few steps.

Streams wait for the whole step. So while there are any, the budget of chunks is what fits `max_step_seconds` by the
estimate of step_time.py, and half a `CHUNK` is the least for each. But there is a whole one for each in line, up to
`EFFICIENT_CHUNK`, even if the step takes longer then. All must come to their end, and under load a bound that always
holds would only make the first tokens wait: as many tokens a second are computed, for fewer streams at a time.
"""

from bisect import bisect_left, bisect_right

from services.scheduler.core.limits import Limits
from services.scheduler.core.sequence import Key, Sequence

REQUEST_SPAN = 600.0
"""Seconds, more than most outputs take."""

CHUNK = 16
"""Positions of chunks that a step has for each sequence in line, however long it takes."""

LEAST_CHUNK = CHUNK // 2
"""Positions that each of them gets before the first in order gets more, unless a block is less."""

EFFICIENT_CHUNK = 128
"""Positions from which on larger chunks make prompts no faster, on CPUs (benchmarks/results/step_time.md)."""


def order_key(limits: Limits, priority: int, arrival: float, serial: int) -> tuple[float, float, int]:
    """Return a request's place in the order: (priority, arrival in seconds, serial).

    With ageing it is (0, arrival plus the aged priority, serial)."""
    if limits.priority_ageing:
        return (0.0, arrival + priority * limits.priority_ageing, serial)
    return (priority, arrival, serial)


def sample_spacing(limits: Limits) -> float:
    """Return the seconds by which each sample of a user's request counts as later than the one before."""
    return REQUEST_SPAN / limits.max_num_seqs


def may_preempt(limits: Limits, waiting: Sequence, running: Sequence) -> bool:
    """Return whether a running sequence may be preempted to admit a waiting one.

    The waiting one must come before it in the order. It must also be more urgent by priority, since an earlier arrival
    alone is no reason to throw work away. With equal priorities, the running one must be beyond its request's share
    of half the slots, and the waiting one within its own.
    """
    share = max(limits.max_num_seqs // 2, 1)
    urgent = waiting.request.priority < running.request.priority
    equal = waiting.request.priority == running.request.priority
    return waiting.key < running.key and (
        urgent or (equal and waiting.samples_before < share <= running.samples_before)
    )


def budget_beside_streams(fitting: int, in_line: int) -> int:
    """Return the positions that chunks share in a step of which others wait for their next token.

    `fitting` ones fit the time that a step should take, and `in_line` sequences run or could run that want them. The
    budget is a multiple of `CHUNK`, so that chunks end where blocks of the usual sizes do.
    """
    least = min(in_line * CHUNK, EFFICIENT_CHUNK)
    return max(fitting // CHUNK * CHUNK, least, CHUNK)


def split_budget(budget: int, demands: list[int], minimum: int) -> list[int]:
    """Return how many positions of `budget` each of `demands` gets, in their order.

    Each gets `minimum`, or its demand if that is less, before others get more, as far as the budget goes.
    """
    grants: list[int] = []
    remaining = budget
    reserved = sum(min(demand, minimum) for demand in demands)  # the minimum of those further back
    for demand in demands:
        reserved -= min(demand, minimum)
        grant = min(demand, max(min(demand, minimum), (remaining - reserved) // 2), remaining)
        grants.append(grant)
        remaining -= grant
    for index, demand in enumerate(demands):
        extra = min(demand - grants[index], remaining)
        grants[index] += extra
        remaining -= extra
    return grants


class SortedSequences:
    """Sequences, sorted by their keys."""

    __slots__ = ("_keys", "items")

    def __init__(self) -> None:
        self._keys: list[Key] = []
        self.items: list[Sequence] = []

    def add(self, sequence: Sequence) -> None:
        """Insert a sequence in its place."""
        index = bisect_right(self._keys, sequence.key)
        self._keys.insert(index, sequence.key)
        self.items.insert(index, sequence)

    def remove(self, sequence: Sequence) -> None:
        """Take a sequence out. Raise ValueError if it is not there."""
        index = bisect_left(self._keys, sequence.key)
        if index == len(self.items) or self.items[index] is not sequence:
            raise ValueError(f"not here: {sequence!r}")
        del self._keys[index], self.items[index]

    def __len__(self) -> int:
        return len(self.items)

    def __repr__(self) -> str:
        return f"<SortedSequences {self.items!r}>"
