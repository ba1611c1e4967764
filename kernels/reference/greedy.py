"""The likeliest token: argmax, a tie going to the lowest id."""

from torch import Tensor


def greedy(logits: Tensor) -> Tensor:
    """`logits` (S, V); gives ids (S,) int64."""
    return logits.argmax(-1)  # torch promises the first of several maxima
