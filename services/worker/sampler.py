"""From rows of logits to tokens.

    raw logits ─▶ log-probabilities, as reported
        └─▶ bias, stop tokens masked before min_tokens ─▶ penalties ─▶ temperature ─▶ min_p ─▶ top_k ─▶ top_p ─▶ draw

A draw is the maximum of logit + Gumbel noise, a function of (seed, sample, output position, token).
So the token of a row depends on that row's logits, parameters and position only. Work is done for the rows that ask
for it: greedy rows without edits take an argmax and nothing else. What is gathered for many rows at once is exact row
by row, or summed in float64; how wide a search is follows from the row's own parameters.
"""

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from kernels.load import Ops
from services.worker.batch import Ints
from services.worker.slots import Slots

GREEDY_BELOW = 1e-5
"""A temperature below this is greedy: equal logits then go to the lowest id, as at 0."""

WIDTHS = (64, 256, 4096)
"""Candidates that are searched for top_k and top_p, before the whole vocabulary is sorted: 32 rows of 49,152 take
4, 5 and 20 ms that way, and 135 ms whole."""

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
        greedy = state.temperature[slots] < GREEDY_BELOW
        penalised = (state.repetition[slots] != 1) | (state.presence[slots] != 0) | (state.frequency[slots] != 0)
        held_back = draws.positions - state.prompt_len[slots] < state.min_tokens[slots]
        plain = greedy & ~penalised & ~held_back & ~state.biased[slots]
        if plain.all():
            return self._ops.greedy(logits)[self._tensor(draws.rows)]
        tokens = torch.empty(len(draws), dtype=torch.int64, device=logits.device)
        if plain.any():
            tokens[self._tensor(plain)] = self._ops.greedy(logits[self._tensor(draws.rows[plain])])
        if not plain.all():
            rest = draws.subset(~plain)
            edited = self._edit(logits[self._tensor(rest.rows)], rest, penalised[~plain], held_back[~plain])
            tokens[self._tensor(~plain)] = self._choose(edited, rest, greedy[~plain])
        return tokens

    def _edit(self, x: Tensor, draws: Draws, penalised: Bools, held_back: Bools) -> Tensor:
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

    def _choose(self, x: Tensor, draws: Draws, greedy: Bools) -> Tensor:
        """Tokens of edited logits."""
        if greedy.all():
            return self._ops.greedy(x)
        tokens = torch.empty(len(x), dtype=torch.int64, device=x.device)
        if greedy.any():
            tokens[self._tensor(greedy)] = self._ops.greedy(x[self._tensor(greedy)])
            x = x[self._tensor(~greedy)]
        tokens[self._tensor(~greedy)] = self._random(x, draws.subset(~greedy))
        return tokens

    def _random(self, x: Tensor, draws: Draws) -> Tensor:
        state, slots = self._state, draws.slots
        z = self._ops.temperature(x, self._tensor(state.temperature[slots]))
        if (state.min_p[slots] > 0).any():
            z = self._ops.min_p(z, self._tensor(state.min_p[slots]))
        filtered = (state.top_k[slots] > 0) | (state.top_p[slots] < 1)
        widths = np.where(filtered, self._first_width(draws), 0)
        tokens = torch.empty(len(z), dtype=torch.int64, device=z.device)
        for width in np.unique(widths).tolist():
            mask = widths == width
            part, chosen = z if mask.all() else z[self._tensor(mask)], draws.subset(mask)
            drawn = self._filtered(part, chosen, width) if width else self._ops.gumbel(part, None, *self._key(chosen))
            tokens[self._tensor(mask)] = drawn
        return tokens.clamp_(max=z.shape[-1] - 1)  # logits of NaN draw nothing; what they give must still be an id

    def _first_width(self, draws: Draws) -> Ints:
        """How many candidates each row begins with: enough for its top_k, or a guess for top_p."""
        top_k = self._state.top_k[draws.slots]
        places = np.searchsorted(WIDTHS, np.where(top_k > 0, top_k, WIDTHS[1]))
        return np.array([*WIDTHS, self._state.vocab_size])[places]

    def _filtered(self, z: Tensor, draws: Draws, width: int) -> Tensor:
        """Draw within top_k and top_p, looking at the best `width` tokens, or at more if those don't suffice."""
        state, slots, vocab = self._state, draws.slots, z.shape[-1]
        width = min(width, vocab)
        best, ids = self._ops.top_k(z, width)
        top_k = np.where(state.top_k[slots] > 0, state.top_k[slots], vocab)
        within = torch.arange(width, device=z.device) < self._tensor(top_k)[:, None]
        best = best.masked_fill(~within, -torch.inf)
        done = (top_k <= width) | (width == vocab)
        limited = state.top_p[slots] < 1
        if limited.any():
            limits = np.where(limited, state.top_p[slots], np.inf)
            kept, complete = self._ops.top_p(best, self._tensor(limits), self._mass(z, best, top_k, width))
            best = best.masked_fill(~kept, -torch.inf)
            done |= complete.cpu().numpy() & (top_k == vocab)  # else the mass that top_k leaves is not known yet
        if done.all():
            return self._ops.gumbel(best, ids, *self._key(draws))
        tokens = torch.empty(len(z), dtype=torch.int64, device=z.device)
        if done.any():
            found = self._tensor(done)
            tokens[found] = self._ops.gumbel(best[found], ids[found], *self._key(draws.subset(done)))
        more = self._tensor(~done)
        wider = next((wider for wider in WIDTHS if wider > width), vocab)
        tokens[more] = self._filtered(z[more], draws.subset(~done), wider)
        return tokens

    def _mass(self, z: Tensor, best: Tensor, top_k: Ints, width: int) -> Tensor:
        """Σ exp(z) over the tokens that top_k leaves, (N,) float64; of no use where those are beyond `width`."""
        inside = best.double().exp().sum(-1)
        if (top_k <= width).all():
            return inside
        return torch.where(self._tensor(top_k <= width), inside, z.exp().sum(-1, dtype=torch.float64))

    def _key(self, draws: Draws) -> tuple[Tensor, Tensor, Tensor]:
        """Seeds, sample indices and output positions: what the noise hangs on, beside the token."""
        state, slots = self._state, draws.slots
        positions = draws.positions - state.prompt_len[slots]
        return self._tensor(state.seed[slots]), self._tensor(state.sample[slots]), self._tensor(positions)

    def _tensor(self, array: npt.NDArray[np.generic]) -> Tensor:
        return torch.from_numpy(array).to(self._state.device)
