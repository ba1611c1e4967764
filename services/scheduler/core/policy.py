"""Who comes before whom, and how a step's budget is shared.

One static key orders everything; lower is served first. Under `fcfs` it is the arrival. Under `priority` it is
arrival + priority × ageing, so a request of any priority is served in time; without ageing it is (priority, arrival),
which is strict and may starve. Ties go by the order of submission, then by sample. Since the key of a sequence never
changes, two of them cannot push each other out in turn.

A user's request of many samples (prompts times n) takes turns with others: each of its samples counts as arrived a
little later than the one before, so that as many as there are slots span `SPREAD` seconds. Others' samples come
between, and may push out what runs of the request beyond half the slots. Each sample still has its fixed place, so it
waits for no more than came before that.

A step's budget goes first to sequences that continue their output, one position each. The rest is for longer stretches
(prompts, and outputs being computed again), in order: each takes half of what is left, but no less than a block, and
what nobody took then goes to the first in order. So a long prompt gets the larger part
of each step and is never stopped by later ones, while a short prompt behind it gets through within a few steps.
"""

from bisect import bisect_left, bisect_right

from services.scheduler.core.limits import Limits
from services.scheduler.core.sequence import Key, Sequence

SPREAD = 600.0
"""Seconds, more than most outputs take. A request whose outputs take longer is in time again with all its samples."""


def rank(limits: Limits, priority: int, arrival: float, serial: int) -> tuple[float, float, int]:
    """A request's place in the order, which is that of its first sample if nothing comes before."""
    if limits.priority_ageing:
        return (0.0, arrival + priority * limits.priority_ageing, serial)
    return (priority, arrival, serial)


def spread(limits: Limits) -> float:
    """Return the seconds by which each sample of a user's request counts as later than the one before."""
    return SPREAD / limits.max_num_seqs


def may_displace(limits: Limits, waiting: Sequence, running: Sequence) -> bool:
    """Whether a waiting sequence may push out a running one to be admitted, on top of being ahead of it in the order.

    It must be more urgent, not only older, since arrivals of equals are no reason to throw work away; or the running
    one is beyond its request's share, which is half the slots, and the waiting one is not.
    """
    share = max(limits.max_num_seqs // 2, 1)
    urgent = waiting.request.priority < running.request.priority
    equal = waiting.request.priority == running.request.priority
    return waiting.key < running.key and (
        urgent or (equal and waiting.samples_before < share <= running.samples_before)
    )


def share(budget: int, wants: list[int], least: int) -> list[int]:
    """Split `budget` among `wants`, which are in order; `least` is what each is sure of, as far as the budget goes."""
    grants: list[int] = []
    left, behind = budget, sum(min(want, least) for want in wants)
    for want in wants:
        sure = min(want, least)
        behind -= sure  # what those further back are sure of
        grant = min(want, max(sure, (left - behind) // 2), left)
        grants.append(grant)
        left -= grant
    for place, want in enumerate(wants):
        more = min(want - grants[place], left)
        grants[place] += more
        left -= more
    return grants


class Ordered:
    """Sequences, sorted by their keys."""

    __slots__ = ("_keys", "items")

    def __init__(self) -> None:
        self._keys: list[Key] = []
        self.items: list[Sequence] = []

    def add(self, sequence: Sequence) -> None:
        """Put it in its place."""
        place = bisect_right(self._keys, sequence.key)
        self._keys.insert(place, sequence.key)
        self.items.insert(place, sequence)

    def remove(self, sequence: Sequence) -> None:
        """Take it out; ValueError if it is not there."""
        place = bisect_left(self._keys, sequence.key)
        if place == len(self.items) or self.items[place] is not sequence:
            raise ValueError(f"not here: {sequence!r}")
        del self._keys[place], self.items[place]

    def __len__(self) -> int:
        return len(self.items)

    def __repr__(self) -> str:
        return f"<Ordered {self.items!r}>"
