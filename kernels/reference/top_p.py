"""Nucleus sampling: the smallest set of the likeliest tokens whose probability is at least top_p."""

from torch import Tensor


def top_p(z: Tensor, limits: Tensor, totals: Tensor) -> tuple[Tensor, Tensor]:
    """Which of the best C tokens of each row belong to the nucleus, and whether it lies within them.

    `z` (S, C) best first, `limits` (S,) in (0, 1) or inf to keep all, `totals` (S,) float64: the sum of exp(z) over
    the row's whole distribution. Gives a bool mask (S, C), always true in the first place, and a bool (S,). The sums
    are float64, so that they don't hang on the order in which a device adds.
    """
    mass = z.double().exp().cumsum(-1)
    wanted = (limits.double() * totals)[:, None]
    kept = (mass < wanted).roll(1, -1)
    kept[:, 0] = True
    return kept, mass[:, -1] >= wanted[:, 0]
