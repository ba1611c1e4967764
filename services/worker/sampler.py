"""From rows of logits to tokens.

    raw logits ─▶ log-probabilities, as reported
        └─▶ bias, stop tokens masked before min_tokens ─▶ penalties ─▶ choice of a token (kernels' `sample`)

A draw is the maximum of logit + Gumbel noise, a function of (seed, sample, output position, token).
So the token of a row depends on that row's logits, parameters and position only. The rows that ask for it are edited,
in copies; the others are read where they are.
"""

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from kernels.ops import Ops
from kernels.sampling_metadata import SamplingMetadata
from services.worker.batch import Ints
from services.worker.slots import Slots

Bools = npt.NDArray[np.bool_]


@dataclass(frozen=True)
class Draws:
    """N tokens to sample. The arrays are (N,), on the host."""

    slots: Ints
    positions: Ints  # where the token will stand in its sequence
    rows: Ints  # which row of the logits it is drawn from

    def subset(self, mask: Bools) -> "Draws":
        return Draws(self.slots[mask], self.positions[mask], self.rows[mask])

    def __len__(self) -> int:
        return len(self.slots)


class Sampler:
    """Samples for the sequences in `state`."""

    def __init__(self, state: Slots, ops: Ops) -> None:
        self._state = state
        self._ops = ops

    def sample(self, logits: Tensor, draws: Draws) -> Tensor:
        """Tokens (N,) int64 for `draws` from `logits` (L, V) float32, which are left as they are."""
        state, slots = self._state, draws.slots
        outputs = draws.positions - state.prompt_len[slots]
        held_back = outputs < state.min_tokens[slots]
        edited = held_back | state.penalised[slots] | state.biased[slots]
        if not edited.any():
            return self._ops.sample(logits, self._choices(draws, outputs, draws.rows))
        tokens = torch.empty(len(draws), dtype=torch.int64, device=logits.device)
        rest = draws.subset(edited)
        x = self._edit(logits[self._tensor(rest.rows)], rest, held_back[edited])
        tokens[self._tensor(edited)] = self._ops.sample(x, self._choices(rest, outputs[edited], np.arange(len(rest))))
        if not edited.all():
            plain = draws.subset(~edited)
            chosen = self._ops.sample(logits, self._choices(plain, outputs[~edited], plain.rows))
            tokens[self._tensor(~edited)] = chosen
        return tokens

    def _choices(self, draws: Draws, outputs: Ints, rows: Ints) -> SamplingMetadata:
        """How `draws` are made, from `rows` of some logits; `outputs` are the positions in the output."""
        state, slots = self._state, draws.slots
        return SamplingMetadata(
            rows=rows,
            temperature=state.temperature[slots],
            top_k=state.top_k[slots],
            top_p=state.top_p[slots],
            min_p=state.min_p[slots],
            seeds=state.seed[slots],
            samples=state.sample[slots],
            positions=outputs,
        )

    def _edit(self, x: Tensor, draws: Draws, held_back: Bools) -> Tensor:
        """Bias, masks and penalties. `x` (N, V) is the caller's to lose."""
        state = self._state
        bias = [
            (row, token, value)
            for row, slot in enumerate(draws.slots)
            if state.biased[slot] and (sampling := state.sampling[slot])
            for token, value in sampling.logit_bias
        ]
        if bias:
            rows, ids, values = (torch.tensor(column, device=x.device) for column in zip(*bias, strict=True))
            x.index_put_((rows, ids), values.to(x.dtype), accumulate=True)
        masked = [
            (row, token)
            for row in np.flatnonzero(held_back)
            if (sampling := state.sampling[draws.slots[row]])
            for token in sampling.stop_token_ids
            if token < state.vocab_size
        ]
        if masked:
            rows, ids = torch.tensor(np.array(masked), device=x.device).T
            x[rows, ids] = -torch.inf
        penalised = state.penalised[draws.slots]
        if penalised.all():
            return self._penalised(x, draws)
        if penalised.any():
            rows = self._tensor(np.flatnonzero(penalised))
            x[rows] = self._penalised(x[rows], draws.subset(penalised))
        return x

    def _penalised(self, x: Tensor, draws: Draws) -> Tensor:
        state, slots = self._state, draws.slots
        return self._ops.penalties(
            x,
            state.tokens[self._tensor(slots), : int(draws.positions.max())],
            self._tensor(state.prompt_len[slots]),
            self._tensor(draws.positions),
            *(self._tensor(array[slots]) for array in (state.repetition, state.presence, state.frequency)),
        )

    def _tensor(self, array: npt.NDArray[np.generic]) -> Tensor:
        return torch.from_numpy(array).to(self._state.device)
