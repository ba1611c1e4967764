"""The sampler: samples tokens from rows of logits.

    raw logits ─▶ log-probabilities (logprobs.py)
        └─▶ bias, stop tokens masked before min_tokens ─▶ penalties ─▶ `Ops.sample`, with the masks of token_masks.py

A token is the maximum of logit + Gumbel noise, a function of (seed, sample, output position, token), so it depends
only on the logits, parameters and position of its own row. Rows with bias, masks or penalties are copied and edited.
Other rows are read in place. The host knows which are edited, and puts their tokens last.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from kernels.ops import Ops
from kernels.sampling_metadata import SamplingMetadata
from services.worker.batch import Batch
from services.worker.sequence_states import Ints, SequenceStates
from services.worker.transfers import Array, Section, StepBuffer
from shared.protocol import Fork

Bools = npt.NDArray[np.bool_]


@dataclass(frozen=True)
class SamplingBatch:
    """N tokens to sample. The arrays are (N,), on the host."""

    slots: Ints
    positions: Ints  # of the token in its sequence
    rows: Ints  # of the logits that the token is sampled from

    def subset(self, chosen: "slice | Bools | Ints") -> "SamplingBatch":
        return SamplingBatch(self.slots[chosen], self.positions[chosen], self.rows[chosen])

    def __len__(self) -> int:
        return len(self.slots)


def build_sampling_batch(batch: Batch, forks: Sequence[Fork]) -> SamplingBatch:
    """Return a token to sample for each sampling row, and one for each child of a fork, from its parent's logits."""
    sampling = batch.samples > 0
    slots, positions = batch.slots[sampling], (batch.starts + batch.counts)[sampling]
    rows = np.arange(len(slots))
    row_of = dict(zip(slots.tolist(), rows.tolist(), strict=True))
    children = [(child, row_of[fork.parent]) for fork in forks for child, _ in fork.children]
    if children:
        child_slots, parents = np.array(children, np.int64).T
        slots = np.concatenate((slots, child_slots))
        positions = np.concatenate((positions, positions[parents]))
        rows = np.concatenate((rows, parents))
    return SamplingBatch(slots, positions, rows)


class Sampler:
    """Samples for the sequences in `states`."""

    def __init__(self, states: SequenceStates, ops: Ops) -> None:
        self._states = states
        self._ops = ops

    def stage(self, batch: SamplingBatch, buffer: StepBuffer) -> "StagedSampling":
        """Add what sampling `batch` needs on the device to `buffer`."""
        states, slots = self._states, batch.slots
        below_min_tokens = batch.positions - states.prompt_len[slots] < states.min_tokens[slots]
        below_min_tokens &= ~states.has_mask[slots]  # which sees to that
        is_edited = below_min_tokens | states.has_penalties[slots] | states.has_logit_bias[slots]
        if is_edited.any():
            order = np.argsort(is_edited, kind="stable")
            batch, below_min_tokens = batch.subset(order), below_min_tokens[order]
        num_unedited = len(batch) - int(is_edited.sum())
        has_mask = states.has_mask[batch.slots]
        masks = np.where(has_mask, np.cumsum(has_mask) - 1, -1)
        unedited, edited = batch.subset(slice(num_unedited)), batch.subset(slice(num_unedited, None))
        return StagedSampling(
            batch=batch,
            slots=buffer.add(batch.slots),
            positions=buffer.add(batch.positions),
            masked=batch.subset(has_mask),
            unedited=(
                self._stage_parameters(unedited, unedited.rows, masks[:num_unedited], buffer) if num_unedited else None
            ),
            edited=(
                self._stage_parameters(edited, np.arange(len(edited)), masks[num_unedited:], buffer)
                if len(edited)
                else None
            ),
            edits=self._stage_edits(edited, below_min_tokens[num_unedited:], buffer) if len(edited) else None,
        )

    def num_required(self, batch: SamplingBatch) -> Ints:
        """Return how many tokens of each sequence must come, with the one that is sampled now, before it may end."""
        states, slots = self._states, batch.slots
        return states.min_tokens[slots] - (batch.positions - states.prompt_len[slots])

    def sample(self, logits: Tensor, staged: "StagedSampling", masks: Tensor | None = None) -> Tensor:
        """Return the tokens (N,) int64 of `staged.batch` from `logits` (L, V) float32, which are not changed.

        `masks` (M, V / 32) int32 are those of `staged.masked`.
        """
        parts = []
        if staged.unedited:
            parts.append(staged.unedited.sample(logits, masks, self._ops))
        if staged.edited and staged.edits:
            x = staged.edits.apply(logits, self._states.tokens, self._ops)
            parts.append(staged.edited.sample(x, masks, self._ops))
        return parts[0] if len(parts) == 1 else torch.cat(parts)

    def _stage_parameters(self, batch: SamplingBatch, rows: Ints, masks: Ints, buffer: StepBuffer) -> "_Parameters":
        """Stage the parameters of `batch`. `rows` (N,) are those of the logits, `masks` (N,) those of the masks."""
        states, slots = self._states, batch.slots
        metadata = SamplingMetadata(
            rows=rows,
            temperature=states.temperature[slots],
            top_k=states.top_k[slots],
            top_p=states.top_p[slots],
            min_p=states.min_p[slots],
            seeds=states.seed[slots],
            samples=states.sample[slots],
            positions=batch.positions - states.prompt_len[slots],
            masks=masks,
        )
        packed = self._ops.pack_metadata(metadata)
        return _Parameters(metadata, None if packed is None else buffer.add(packed))

    def _stage_edits(self, batch: SamplingBatch, below_min_tokens: Bools, buffer: StepBuffer) -> "_Edits":
        states = self._states
        added = [
            (row, token, value)
            for row, slot in enumerate(batch.slots)
            if states.has_logit_bias[slot] and (sampling := states.sampling[slot])
            for token, value in sampling.logit_bias
        ]
        added += [
            (row, token, -np.inf)
            for row in np.flatnonzero(below_min_tokens).tolist()
            if (sampling := states.sampling[batch.slots[row]])
            for token in sampling.stop_token_ids
            if token < states.vocab_size
        ]
        rows, ids, values = zip(*added, strict=True) if added else ((), (), ())
        columns = np.array(rows, np.int64), np.array(ids, np.int64), np.array(values, np.float32)
        penalized = np.flatnonzero(states.has_penalties[batch.slots])
        part = batch.subset(penalized)
        penalties = (states.repetition_penalty, states.presence_penalty, states.frequency_penalty)
        arrays: list[Array] = [penalized, part.slots, states.prompt_len[part.slots], part.positions]
        arrays += [penalty[part.slots] for penalty in penalties]
        return _Edits(
            rows=buffer.add(batch.rows),
            added=[buffer.add(column) for column in columns] if added else None,
            penalized=[buffer.add(array) for array in arrays] if len(part) else None,
            all_penalized=len(part) == len(batch),
            max_length=int(part.positions.max(initial=0)),
        )


@dataclass(frozen=True)
class StagedSampling:
    """A batch whose parameters were staged: the unedited tokens of `batch` come first."""

    batch: SamplingBatch
    slots: Section  # (N,) int64
    positions: Section  # (N,) int64
    masked: SamplingBatch  # the tokens of sequences that have masks
    unedited: "_Parameters | None"
    edited: "_Parameters | None"
    edits: "_Edits | None"  # of the logits of the edited tokens


@dataclass(frozen=True)
class _Parameters:
    metadata: SamplingMetadata
    packed: Section | None

    def sample(self, logits: Tensor, masks: Tensor | None, ops: Ops) -> Tensor:
        packed = None if self.packed is None else self.packed.tensor
        return ops.sample(logits, self.metadata, packed, masks)


@dataclass(frozen=True)
class _Edits:
    """The edits of E rows of logits."""

    rows: Section  # (E,) int64: the rows of the logits to copy
    added: list[Section] | None  # rows, token ids and what is added to their logits
    penalized: list[Section] | None  # rows, and for each its slot, prompt length, length and three penalties
    all_penalized: bool
    max_length: int  # of the penalized sequences

    def apply(self, logits: Tensor, tokens: Tensor, ops: Ops) -> Tensor:
        """Return the edited rows (E, V). `tokens` are those of all slots."""
        x = logits.index_select(0, self.rows.tensor)
        if self.added:
            rows, ids, values = (section.tensor for section in self.added)
            x.index_put_((rows, ids), values.to(x.dtype), accumulate=True)
        if self.penalized:
            rows, slots, *arguments = (section.tensor for section in self.penalized)
            sequences = tokens[:, : self.max_length].index_select(0, slots)
            if self.all_penalized:
                return ops.penalties(x, sequences, *arguments)
            x.index_copy_(0, rows, ops.penalties(x.index_select(0, rows), sequences, *arguments))
        return x
