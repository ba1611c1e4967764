"""`SequenceStates`: the state of running sequences, in arrays indexed by the scheduler's slots.

Tokens and block tables are on the device, so that a sampled token need not wait for the host before the next step.
Lengths, limits and sampling parameters are on the host, which decides what a step has to do.

All that lies on the device is one tensor, the state. A step's changes to it are sent as segments, to be copied into it
by one operation; a second and third are needed only where changes depend on each other.
"""

import math
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from kernels.batch_rows import BatchRows, RowLengths
from kernels.ops import Ops
from services.worker.transfers import Array, StepBuffer
from shared.protocol import Configure, Fork, NewSequence, Sampling, StepPlan, TableWrite

_UINT64_RANGE = 2**64  # seeds are unsigned, and the arrays hold int64

Ints = npt.NDArray[np.int64]


class SequenceStates:
    """The sequences of one epoch. Arrays are (S,) on the host, or (S, ...) on the device, for S slots."""

    def __init__(self, sizes: Configure, vocab_size: int, device: torch.device) -> None:
        slots, length = sizes.max_num_seqs, sizes.max_model_len + 1  # a finished sequence may get one stray row
        self.block_size, self.max_length = sizes.block_size, length
        self.vocab_size = vocab_size
        self.device = device
        shapes = [(slots, length), (slots, -(-length // sizes.block_size)), (slots + 1,), (slots,), (slots,)]
        widths = [-(-math.prod(shape) // 4) * 4 for shape in shapes]  # all begin at multiples of 16 bytes
        self._state = torch.zeros(sum(widths), dtype=torch.int32, device=device)
        parts = [
            part[: math.prod(shape)].view(shape)
            for part, shape in zip(torch.split(self._state, widths), shapes, strict=True)
        ]
        self.tokens, self.block_tables, self._offsets, self._starts, self._row_slots = parts
        self.prompt_len = np.zeros(slots, np.int64)
        self.seed, self.sample = np.zeros(slots, np.int64), np.zeros(slots, np.int64)
        self.temperature, self.top_p, self.min_p = (np.zeros(slots, np.float32) for _ in range(3))
        self.repetition_penalty = np.zeros(slots, np.float32)
        self.presence_penalty, self.frequency_penalty = np.zeros(slots, np.float32), np.zeros(slots, np.float32)
        self.top_k, self.min_tokens = np.zeros(slots, np.int64), np.zeros(slots, np.int64)
        self.num_logprobs, self.num_prompt_logprobs = np.full(slots, -1, np.int64), np.full(slots, -1, np.int64)
        self.has_logit_bias, self.has_penalties = np.zeros(slots, bool), np.zeros(slots, bool)
        self.has_mask, self.has_logprob_ids = np.zeros(slots, bool), np.zeros(slots, bool)
        self.adapter_slot = np.full(slots, -1, np.int64)  # of the sequence's adapter; -1: it uses none
        self.sampling: list[Sampling | None] = [None] * slots

    def clear(self) -> None:
        """Drop all sequences."""
        self.sampling = [None] * len(self.sampling)

    def stage(self, plan: StepPlan, buffer: StepBuffer) -> "StateChanges":
        """Apply the changes of `plan` on the host, and return those on the device, whose numbers go to `buffer`."""
        changes = StateChanges(self._state, buffer)
        for slot in plan.released_slots:
            self.sampling[slot] = None
        for sequence in plan.new_sequences:
            self._add(sequence, changes)
        lengths = {row.slot: row.start + row.count for row in plan.rows} if plan.forks else {}
        for fork in plan.forks:
            self._fork(fork, lengths.get(fork.parent, 0), changes)
        starts = {row.slot: row.start for row in plan.rows} if plan.sampled else {}
        for slot, token in plan.sampled:
            changes.write(self.tokens[slot, starts[slot] :], np.array([token], np.int32))
        # A table that is written or copied in this plan may be changed by it once more.
        self._write_tables(plan.table_writes, changes, after_copies=bool(plan.new_sequences or plan.forks))
        return changes

    def rows(self, count: int, lengths: RowLengths) -> BatchRows:
        """Return the first `count` rows of a step as they lie on the device: at the same address in each step, as a
        CUDA graph needs.
        """
        return BatchRows(self._offsets[: count + 1], self._starts[:count], self._row_slots[:count], lengths)

    def stage_rows(self, slots: Ints, starts: Ints, offsets: Ints, changes: "StateChanges") -> None:
        """Add the rows of a step, (R,) and offsets (R + 1,), to `changes`."""
        for part, array in ((self._offsets, offsets), (self._starts, starts), (self._row_slots, slots)):
            changes.write(part, array)

    def store_tokens(self, slots: Tensor, positions: Tensor, tokens: Tensor) -> None:
        """Store sampled tokens at their positions. All three are (N,) int64 on the device."""
        self.tokens[slots, positions] = tokens.int()

    def _add(self, sequence: NewSequence, changes: "StateChanges") -> None:
        slot = sequence.slot
        changes.write(self.tokens[slot], np.frombuffer(sequence.tokens, "<i4"))
        changes.write(self.block_tables[slot], np.array(sequence.blocks, np.int32))
        self.prompt_len[slot], self.adapter_slot[slot] = sequence.prompt_len, sequence.adapter_slot
        self._set_sampling(slot, sequence.sampling, sequence.sample)

    def _fork(self, fork: Fork, length: int, changes: "StateChanges") -> None:
        sampling = self.sampling[fork.parent]
        if sampling is None:
            raise ValueError(f"slot {fork.parent} forks, but holds no sequence")
        for slot, sample in fork.children:
            changes.copy(self.tokens[slot], self.tokens[fork.parent], length)
            changes.copy(self.block_tables[slot], self.block_tables[fork.parent], self.block_tables.shape[1])
            self.prompt_len[slot], self.adapter_slot[slot] = (
                self.prompt_len[fork.parent],
                self.adapter_slot[fork.parent],
            )
            self._set_sampling(slot, sampling, sample)

    def _set_sampling(self, slot: int, sampling: Sampling, sample: int) -> None:
        self.sampling[slot] = sampling
        self.sample[slot] = sample
        self.seed[slot] = sampling.seed - _UINT64_RANGE if sampling.seed >= _UINT64_RANGE // 2 else sampling.seed
        self.temperature[slot], self.top_k[slot] = sampling.temperature, sampling.top_k
        self.top_p[slot], self.min_p[slot] = sampling.top_p, sampling.min_p
        self.repetition_penalty[slot] = sampling.repetition_penalty
        self.presence_penalty[slot] = sampling.presence_penalty
        self.frequency_penalty[slot] = sampling.frequency_penalty
        self.min_tokens[slot] = sampling.min_tokens
        self.num_logprobs[slot], self.num_prompt_logprobs[slot] = sampling.logprobs, sampling.prompt_logprobs
        self.has_logprob_ids[slot] = bool(sampling.logprob_token_ids)
        self.has_logit_bias[slot] = bool(sampling.logit_bias)
        penalties = (sampling.repetition_penalty, sampling.presence_penalty, sampling.frequency_penalty)
        self.has_penalties[slot] = penalties != (1, 0, 0)
        self.has_mask[slot] = is_masked(sampling)

    def _write_tables(self, writes: Sequence[TableWrite], changes: "StateChanges", *, after_copies: bool) -> None:
        for write in writes:
            table = self.block_tables[write.slot, write.index :]
            changes.write(table, np.array(write.blocks, np.int32), after_copies=after_copies)


def is_masked(sampling: Sampling) -> bool:
    """Return whether the tokens that may be sampled are limited to those of a mask."""
    limited = sampling.grammar or sampling.allowed_tokens or sampling.bad_words
    return bool(limited) or sampling.reasoning_limit is not None


class StateChanges:
    """Segments to be copied into the state: writes, then copies within the state, then writes that follow these."""

    def __init__(self, state: Tensor, buffer: StepBuffer) -> None:
        self._state, self._buffer = state, buffer
        self._writes: list[tuple[int, int, int]] = []
        self._copies: list[tuple[int, int, int]] = []
        self._late_writes: list[tuple[int, int, int]] = []

    def write(self, part: Tensor, array: Array, *, after_copies: bool = False) -> None:
        """Write `array` to the beginning of `part`, a contiguous part of the state."""
        if len(array):
            segment = (
                int(part.storage_offset()),
                self._buffer.add(array.astype(np.int32, copy=False)).word,
                len(array),
            )
            (self._late_writes if after_copies else self._writes).append(segment)

    def copy(self, part: Tensor, source: Tensor, length: int) -> None:
        """Copy `length` numbers from one part of the state to another."""
        self._copies.append((int(part.storage_offset()), int(source.storage_offset()), length))

    def apply(self, ops: Ops) -> None:
        """Send the buffer, with all that was added to it, and change the state."""
        sources = ((self._writes, self._buffer), (self._copies, None), (self._late_writes, self._buffer))
        tables = [(self._buffer.add(np.array(part, np.int64)), source) for part, source in sources if part]
        self._buffer.send()
        for table, source in tables:
            numbers = self._state if source is None else source.words
            ops.copy_segments(self._state, numbers, table.tensor, int(table.array[:, 2].max()))
