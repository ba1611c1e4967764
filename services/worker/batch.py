"""The ragged batch of a step: a plan's rows.

A row may have one token or a thousand: nothing here tells prefill from decode.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from kernels.batch_rows import BatchRows, RowLengths
from kernels.lora import LoraSegments
from kernels.ops import Ops
from services.worker.models.causal_lm import Inputs
from services.worker.sequence_states import Ints, SequenceStates, StateChanges
from services.worker.transfers import Section, StepBuffer
from shared.protocol import Row


@dataclass(frozen=True)
class Batch:
    """R rows with T tokens in all. The arrays are (R,), on the host, with the fields of `Row`."""

    slots: Ints
    starts: Ints
    counts: Ints
    samples: Ints
    offsets: Ints  # (R + 1,): the tokens of row r are those from offsets[r] to offsets[r + 1] - 1

    @property
    def num_tokens(self) -> int:
        return int(self.offsets[-1])

    @property
    def lengths(self) -> RowLengths:
        counts = self.counts
        return RowLengths(int(counts.min()), int(counts.max()), int((self.starts + counts).max()))

    def stage(self, states: SequenceStates, changes: StateChanges, *, padded_to: int = 0) -> BatchRows:
        """Add the rows, and as many empty ones as are missing to `padded_to`, to `changes`. Return all of them."""
        missing = max(0, padded_to - len(self.slots))
        slots, starts = (np.pad(array, (0, missing)) if missing else array for array in (self.slots, self.starts))
        offsets = np.pad(self.offsets, (0, missing), mode="edge") if missing else self.offsets
        states.stage_rows(slots, starts, offsets, changes)
        return states.rows(len(slots), self.lengths)


def build_batch(rows: Sequence[Row]) -> Batch:
    """Return the batch of `rows`, of which there is at least one."""
    columns = np.array([(row.slot, row.start, row.count, row.samples) for row in rows], np.int64)
    slots, starts, counts, samples = np.ascontiguousarray(columns.T)
    offsets = np.concatenate((np.zeros(1, np.int64), counts.cumsum()))
    return Batch(slots, starts, counts, samples, offsets)


class StagedSegments(NamedTuple):
    """`LoraSegments` of a step, in a buffer that goes to the device."""

    slots: Section
    offsets: Section
    longest: int

    @property
    def segments(self) -> LoraSegments:
        """The segments on the device, after the buffer was sent."""
        return LoraSegments(self.slots.tensor, self.offsets.tensor, self.longest)


def sort_by_adapter(rows: Sequence[Row], states: SequenceStates) -> Sequence[Row]:
    """Return the rows in an order in which those of one adapter lie side by side, after those that use none."""
    return sorted(rows, key=lambda row: int(states.adapter_slot[row.slot]))


def stage_segments(batch: Batch, states: SequenceStates, buffer: StepBuffer) -> StagedSegments | None:
    """Add the tokens of `batch` that use adapters to `buffer`. Return None if none does."""
    by_row = states.adapter_slot[batch.slots]
    first = np.searchsorted(by_row, 0)
    if first == len(by_row):
        return None
    slots, begins = np.unique(by_row[first:], return_index=True)
    offsets = np.append(batch.offsets[first + begins], batch.num_tokens)
    return StagedSegments(buffer.add(slots), buffer.add(offsets), int(np.diff(offsets).max()))


def prepare_inputs(rows: BatchRows, num_tokens: int, states: SequenceStates, num_kv_heads: int, ops: Ops) -> Inputs:
    """Return the model's inputs for `num_tokens` tokens of `rows`; those after the last row's are padding."""
    tokens, positions, slot_mapping = ops.prepare_inputs(
        rows, states.tokens, states.block_tables, num_tokens=num_tokens, block_size=states.block_size
    )
    attention = ops.plan_attention(rows, states.block_tables, block_size=states.block_size, num_kv_heads=num_kv_heads)
    return Inputs(tokens, positions, slot_mapping, attention)
