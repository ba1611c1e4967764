"""The inputs of a step, from the plan that the host has sent and from what lies on the device already."""

import torch
from torch import Tensor

from kernels.batch_rows import BatchRows
from kernels.layout import flat_slots


def copy_segments(destination: Tensor, source: Tensor, segments: Tensor, longest: int) -> None:
    """destination[d : d + n] = source[s : s + n] for each segment (d, s, n)."""
    for first, begin, length in segments.tolist():
        destination[first : first + length] = source[begin : begin + length]


def prepare_inputs(
    rows: BatchRows, tokens: Tensor, block_tables: Tensor, *, num_tokens: int, block_size: int
) -> tuple[Tensor, Tensor, Tensor]:
    """Token t of row r, at position p = starts[r] + t - offsets[r], is tokens[slots[r], p]."""
    index = torch.arange(num_tokens, device=tokens.device, dtype=rows.offsets.dtype)
    row = torch.searchsorted(rows.offsets[1:], index, right=True)
    used = int(rows.offsets[-1])
    if used < num_tokens:
        row[used:] = len(rows.starts) - 1
    slots = rows.slots[row].long()
    positions = (index - rows.offsets[row] + rows.starts[row]).long()
    positions[used:] = 0
    ids, indices = tokens[slots, positions], flat_slots(block_tables, slots, positions, block_size)
    ids[used:], indices[used:] = 0, -1
    return ids, positions, indices
