"""The sampler: samples tokens from rows of logits.

    raw logits ─▶ log-probabilities (logprobs.py)
        └─▶ bias, stop tokens masked before min_tokens ─▶ penalties ─▶ `Ops.sample`

A token is the maximum of logit + Gumbel noise, a function of (seed, sample, output position, token), so it depends
only on the logits, parameters and position of its own row. Rows with bias, masks or penalties are copied and edited.
Other rows are read in place.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from kernels.ops import Ops
from kernels.sampling_metadata import SamplingMetadata
from services.worker.batch import Batch, Ints
from services.worker.sequence_states import SequenceStates
from shared.protocol import Fork

Bools = npt.NDArray[np.bool_]


@dataclass(frozen=True)
class SamplingBatch:
    """N tokens to sample. The arrays are (N,), on the host."""

    slots: Ints
    positions: Ints  # of the token in its sequence
    rows: Ints  # of the logits that the token is sampled from

    def subset(self, mask: Bools) -> "SamplingBatch":
        return SamplingBatch(self.slots[mask], self.positions[mask], self.rows[mask])

    def __len__(self) -> int:
        return len(self.slots)


def build_sampling_batch(batch: Batch, forks: Sequence[Fork]) -> SamplingBatch:
    """Return a token to sample for each sampling row, then one for each child of a fork, from its parent's logits."""
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

    def sample(self, logits: Tensor, batch: SamplingBatch) -> Tensor:
        """Return the tokens (N,) int64 of `batch` from `logits` (L, V) float32, which are not changed."""
        states, slots = self._states, batch.slots
        output_positions = batch.positions - states.prompt_len[slots]
        below_min_tokens = output_positions < states.min_tokens[slots]
        edited = below_min_tokens | states.has_penalties[slots] | states.has_logit_bias[slots]
        if not edited.any():
            return self._ops.sample(logits, self._metadata(batch, output_positions, batch.rows))
        tokens = torch.empty(len(batch), dtype=torch.int64, device=logits.device)
        part = batch.subset(edited)
        x = self._edit(logits[self._tensor(part.rows)], part, below_min_tokens[edited])
        parameters = self._metadata(part, output_positions[edited], np.arange(len(part)))
        tokens[self._tensor(edited)] = self._ops.sample(x, parameters)
        if not edited.all():
            part = batch.subset(~edited)
            parameters = self._metadata(part, output_positions[~edited], part.rows)
            tokens[self._tensor(~edited)] = self._ops.sample(logits, parameters)
        return tokens

    def _metadata(self, batch: SamplingBatch, output_positions: Ints, rows: Ints) -> SamplingMetadata:
        """Return the parameters of `batch` for `Ops.sample`. `rows` (N,) are the rows of the logits to sample from."""
        states, slots = self._states, batch.slots
        return SamplingMetadata(
            rows=rows,
            temperature=states.temperature[slots],
            top_k=states.top_k[slots],
            top_p=states.top_p[slots],
            min_p=states.min_p[slots],
            seeds=states.seed[slots],
            samples=states.sample[slots],
            positions=output_positions,
        )

    def _edit(self, x: Tensor, batch: SamplingBatch, below_min_tokens: Bools) -> Tensor:
        """Apply bias, masks and penalties to the logits `x` (N, V), which may be overwritten, and return them."""
        states = self._states
        bias = [
            (row, token, value)
            for row, slot in enumerate(batch.slots)
            if states.has_logit_bias[slot] and (sampling := states.sampling[slot])
            for token, value in sampling.logit_bias
        ]
        if bias:
            rows, ids, values = (torch.tensor(column, device=x.device) for column in zip(*bias, strict=True))
            x.index_put_((rows, ids), values.to(x.dtype), accumulate=True)
        masked = [
            (row, token)
            for row in np.flatnonzero(below_min_tokens)
            if (sampling := states.sampling[batch.slots[row]])
            for token in sampling.stop_token_ids
            if token < states.vocab_size
        ]
        if masked:
            rows, ids = torch.tensor(np.array(masked), device=x.device).T
            x[rows, ids] = -torch.inf
        penalized = states.has_penalties[batch.slots]
        if penalized.all():
            return self._penalize(x, batch)
        if penalized.any():
            rows = self._tensor(np.flatnonzero(penalized))
            x[rows] = self._penalize(x[rows], batch.subset(penalized))
        return x

    def _penalize(self, x: Tensor, batch: SamplingBatch) -> Tensor:
        states, slots = self._states, batch.slots
        penalties = (states.repetition_penalty, states.presence_penalty, states.frequency_penalty)
        return self._ops.penalties(
            x,
            states.tokens[self._tensor(slots), : int(batch.positions.max())],
            self._tensor(states.prompt_len[slots]),
            self._tensor(batch.positions),
            *(self._tensor(penalty[slots]) for penalty in penalties),
        )

    def _tensor(self, array: npt.NDArray[np.generic]) -> Tensor:
        return torch.from_numpy(array).to(self._states.device)
