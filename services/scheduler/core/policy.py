"""Who comes before whom, and how a step's budget is shared.

One static key orders everything; lower is served first. Under `fcfs` it is the arrival. Under `priority` it is
arrival + priority × ageing, so a request of any priority is served in time; without ageing it is (priority, arrival),
which is strict and may starve. Ties go by the order of submission, then by sample. Since the key of a sequence never
changes, two of them cannot push each other out in turn.

A step's budget goes first to sequences that continue their output, one position each. The rest is for longer stretches
(prompts, and outputs being computed again), in order: each takes half of what is left, but no less than a block, and
what nobody took then goes to the first in order. So a long prompt gets the larger part
of each step and is never stopped by later ones, while a short prompt behind it gets through within a few steps.
"""

from bisect import bisect_left, bisect_right

from services.scheduler.core.limits import Limits
from services.scheduler.core.sequence import Key, Sequence


def rank(limits: Limits, priority: int, arrival: float, serial: int) -> tuple[float, float, int]:
    """A request's place in the order; its samples follow each other within it."""
    if limits.priority_ageing:
        return (0.0, arrival + priority * limits.priority_ageing, serial)
    return (priority, arrival, serial)


def may_displace(waiting: Sequence, running: Sequence) -> bool:
    """Whether a waiting sequence may push out a running one to be admitted, on top of being ahead of it in the order.

    It must be more urgent, not only older: arrivals of equals are no reason to throw work away.
    """
    return waiting.key < running.key and waiting.request.priority < running.request.priority


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
