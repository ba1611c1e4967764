"""Adapters (LoRA) of a linear operation, as every device's kernels take them.

    y[t] += B[s] A[s] x[t]          s is the slot of the adapter that token t uses

The outputs of an operation may be in parts, of queries, keys and values, say: each has an A and a B of its own. Factors
of B A are in B. The tokens of one adapter lie side by side in a batch, so that a kernel reads an adapter once for all.
"""

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

MIN_RANK = 8


class LoraSegments(NamedTuple):
    """The tokens of a batch that use adapters; the others come before, between or after them."""

    slots: Tensor  # (N,) int64: the slot of each segment's adapter
    offsets: Tensor  # (N + 1,) int64: segment n is the tokens from offsets[n] to offsets[n + 1] - 1
    longest: int  # tokens of the longest segment


class LoraStack(NamedTuple):
    """The adapters of one operation on its device, in S slots. Ranks are padded to `rank`, with zeros."""

    a: Tensor  # (S, ...) of all parts, in an order that only the device's kernels know
    b: Tensor  # (S, ...)
    ranks: Tensor  # (S, P) int32: the rank of each part; 0: the adapter leaves it alone
    outputs: tuple[int, ...]  # of each of the P parts
    inputs: int
    rank: int

    def put(self, slot: int, weights: "LoraWeights | None") -> None:
        """Let `slot` hold the weights of another adapter; None: it has none for this operation."""
        for target, source in zip(self[:3], weights or (None,) * 3, strict=True):
            if source is None:
                target[slot].zero_()
            else:
                target[slot].copy_(source, non_blocking=True)


class LoraWeights(NamedTuple):
    """An adapter's weights for one operation, on the host and in the order of a `LoraStack`'s slot."""

    a: Tensor
    b: Tensor
    ranks: Tensor  # (P,) int32


LoraPart = tuple[Tensor, Tensor]
"""A (rank, in) and B (out, rank) of one part, where B has the adapter's factor."""


def padded_rank(rank: int) -> int:
    """Return the rank that an adapter of `rank` takes on the device: 8, 16, 32 and so on."""
    return max(MIN_RANK, 1 << (rank - 1).bit_length())


def joined(parts: Sequence[LoraPart | None], stack: LoraStack) -> LoraWeights:
    """Return A (P R, in) of all parts, one below the other, B (out, R), and the ranks. Missing parts are zero."""
    a = torch.zeros(len(parts), stack.rank, stack.inputs)
    b = torch.zeros(sum(stack.outputs), stack.rank)
    ranks = torch.zeros(len(parts), dtype=torch.int32)
    for index, (part, b_rows) in enumerate(zip(parts, torch.split(b, list(stack.outputs)), strict=True)):
        if part is not None:
            rank = len(part[0])
            a[index, :rank], b_rows[:, :rank], ranks[index] = *part, rank
    return LoraWeights(a.flatten(0, 1), b, ranks)
