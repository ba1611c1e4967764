"""`BatchRows`: which tokens of which sequences a step computes."""

from typing import NamedTuple

import torch
from torch import Tensor


class RowLengths(NamedTuple):
    """Bounds of a batch's rows that the host knows although the rows lie on a device. Kernels are chosen by them."""

    min_queries: int  # no row has fewer tokens, except 0
    max_queries: int  # no row has more tokens
    max_length: int  # no row reaches this position


class BatchRows(NamedTuple):
    """R rows: row r is tokens offsets[r] to offsets[r + 1] - 1 of a batch, at consecutive positions of one sequence.

    A row without tokens is padding.
    """

    offsets: Tensor  # (R + 1,) int32 or int64
    starts: Tensor  # (R,) int32 or int64: the position of each row's first token
    slots: Tensor  # (R,) int32 or int64: each sequence's row of the block tables
    lengths: RowLengths

    @classmethod
    def of(cls, offsets: Tensor, starts: Tensor, slots: Tensor | None = None) -> "BatchRows":
        """Return the rows of at least one token, all on the CPU; without `slots`, row r has the r-th block table."""
        counts = offsets.diff()
        lengths = RowLengths(int(counts.min()), int(counts.max()), int((starts + counts).max()))
        return cls(offsets, starts, torch.arange(len(starts)) if slots is None else slots, lengths)

    def to(self, device: torch.device) -> "BatchRows":
        """Return the same rows on `device`."""
        return BatchRows(self.offsets.to(device), self.starts.to(device), self.slots.to(device), self.lengths)
