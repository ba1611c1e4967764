"""The ragged batch of a step: a plan's rows as index tensors.

A row may have one token or a thousand: nothing here tells prefill from decode.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch

from kernels.layout import KVLayout, flat_slots
from kernels.ops import Ops
from services.worker.models.causal_lm import Inputs
from services.worker.sequence_states import SequenceStates
from shared.protocol import Row

Ints = npt.NDArray[np.int64]


@dataclass(frozen=True)
class Batch:
    """R rows with T tokens in all. The arrays are (R,), on the host, with the fields of `Row`."""

    inputs: Inputs
    slots: Ints
    starts: Ints
    counts: Ints
    samples: Ints
    offsets: Ints  # (R + 1,): the tokens of row r are those from offsets[r] to offsets[r + 1] - 1


def build_batch(rows: Sequence[Row], states: SequenceStates, layout: KVLayout, ops: Ops) -> Batch:
    """Return the batch of `rows`, of which there is at least one."""
    columns = np.array([(row.slot, row.start, row.count, row.samples) for row in rows], np.int64)
    slots, starts, counts, samples = np.ascontiguousarray(columns.T)
    offsets = np.concatenate((np.zeros(1, np.int64), counts.cumsum()))
    row_of = np.repeat(np.arange(len(rows)), counts)
    positions = np.arange(offsets[-1]) - offsets[row_of] + starts[row_of]

    device = states.device
    token_slots, token_positions = (torch.from_numpy(array).to(device) for array in (slots[row_of], positions))
    width = -(-int((starts + counts).max()) // layout.block_size)
    attention = ops.plan_attention(
        torch.from_numpy(offsets),
        torch.from_numpy(starts),
        states.block_tables[torch.from_numpy(slots).to(device), :width],
        block_size=layout.block_size,
        num_kv_heads=layout.num_kv_heads,
    )
    inputs = Inputs(
        tokens=states.tokens[token_slots, token_positions],
        positions=token_positions,
        slot_mapping=flat_slots(states.block_tables, token_slots, token_positions, layout.block_size),
        attention=attention,
    )
    return Batch(inputs, slots, starts, counts, samples, offsets)
