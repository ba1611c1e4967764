"""The order of sequences, and how a step's budget is split among them.

One static key orders everything; lower is served first. Under `fcfs` it is the arrival. Under `priority` it is
arrival + priority × ageing, so a request of any priority is served in time; without ageing it is (priority, arrival),
which is strict and may starve. Ties go by the order of submission, then by sample. Since the key of a sequence never
changes, two of them cannot preempt each other in turn.

A user's request of many samples (prompts times n) takes turns with others: each of its samples counts as arrived a
little later than the one before, so that as many as there are slots span `SPREAD` seconds. Others' samples come
between, and may preempt those of its samples that run beyond half the slots. Each sample still has its fixed place, so
it waits only for what comes before that.

A step's budget goes first to sequences that continue their output, one position each. The rest is for longer chunks
(of prompts, and of outputs that are computed again), in order: each takes half of what is left, but no less than a
block, and what nobody took then goes to the first in order. So a long prompt gets the larger part of each step and is
never stopped by later ones, while a short prompt behind it gets through within a few steps.
"""

from bisect import bisect_left, bisect_right

from services.scheduler.core.limits import Limits
from services.scheduler.core.sequence import Key, Sequence

SPREAD = 600.0
"""Seconds, more than most outputs take. A request whose outputs take longer is in time again with all its samples."""


def rank(limits: Limits, priority: int, arrival: float, serial: int) -> tuple[float, float, int]:
    """Return a request's place in the order, which is that of its first sample if nothing comes before that."""
    if limits.priority_ageing:
        return (0.0, arrival + priority * limits.priority_ageing, serial)
    return (priority, arrival, serial)


def spread(limits: Limits) -> float:
    """Return the seconds by which each sample of a user's request counts as later than the one before."""
    return SPREAD / limits.max_num_seqs


def may_preempt(limits: Limits, waiting: Sequence, running: Sequence) -> bool:
    """Return whether a running sequence may be preempted to admit a waiting one.

    The waiting one must come before it in the order. It must also be more urgent, not only older, since arrivals of
    equals are no reason to throw work away; or else the running one must be beyond its request's share, which is half
    the slots, and the waiting one within.
    """
    share = max(limits.max_num_seqs // 2, 1)
    urgent = waiting.request.priority < running.request.priority
    equal = waiting.request.priority == running.request.priority
    return waiting.key < running.key and (
        urgent or (equal and waiting.samples_before < share <= running.samples_before)
    )


def split_budget(budget: int, demands: list[int], minimum: int) -> list[int]:
    """Return how much of `budget` each of `demands` gets. They are in order.

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
