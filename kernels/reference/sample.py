"""The token of each row: the likeliest, or one drawn within min_p, top_k and top_p.

    logits ─▶ temperature ─▶ min_p ─▶ top_k ─▶ top_p ─▶ draw by noise

A row's token depends on that row's logits and parameters only. Work is done for the rows that ask for it, and in
candidates instead of the whole vocabulary: how wide a search is follows from the row's own parameters. What is gathered
for many rows at once is exact row by row, or summed in float64.
"""

from dataclasses import dataclass, fields

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from kernels.reference.greedy import greedy
from kernels.reference.gumbel import gumbel
from kernels.reference.min_p import min_p
from kernels.reference.temperature import temperature
from kernels.reference.top_k import top_k
from kernels.reference.top_p import top_p

GREEDY_BELOW = 1e-5
"""A temperature below this is greedy: equal logits then go to the lowest id, as at 0."""

WIDTHS = (64, 256, 4096)
"""Candidates that are searched for top_k and top_p, before the whole vocabulary is sorted: 32 rows of 49,152 take
4, 5 and 20 ms that way, and 135 ms whole."""

Ints = npt.NDArray[np.int64]
Floats = npt.NDArray[np.float32]
Bools = npt.NDArray[np.bool_]


@dataclass(frozen=True)
class Choices:
    """How N tokens are to be chosen. Arrays (N,) on the host, since they decide what is to be done."""

    rows: Ints  # of the logits
    temperature: Floats
    top_k: Ints  # 0: off
    top_p: Floats  # in (0, 1]
    min_p: Floats  # in [0, 1]
    seeds: Ints  # any 64 bits
    samples: Ints
    positions: Ints  # of the token in the output

    def subset(self, mask: Bools) -> "Choices":
        return Choices(*(getattr(self, field.name)[mask] for field in fields(self)))

    def __len__(self) -> int:
        return len(self.rows)


def sample(logits: Tensor, choices: Choices) -> Tensor:
    """Tokens (N,) int64 from `logits` (L, V) float32, which are left as they are."""
    likeliest = choices.temperature < GREEDY_BELOW
    if likeliest.all():
        return greedy(logits)[_on(logits, choices.rows)]
    tokens = torch.empty(len(choices), dtype=torch.int64, device=logits.device)
    if likeliest.any():
        tokens[_on(logits, likeliest)] = greedy(logits[_on(logits, choices.rows[likeliest])])
    tokens[_on(logits, ~likeliest)] = _random(logits, choices.subset(~likeliest))
    return tokens


def _random(logits: Tensor, choices: Choices) -> Tensor:
    z = temperature(logits[_on(logits, choices.rows)], _on(logits, choices.temperature))
    if (choices.min_p > 0).any():
        z = min_p(z, _on(z, choices.min_p))
    filtered = (choices.top_k > 0) | (choices.top_p < 1)
    widths = np.where(filtered, _first_width(choices, z.shape[-1]), 0)
    tokens = torch.empty(len(z), dtype=torch.int64, device=z.device)
    for width in np.unique(widths).tolist():
        mask = widths == width
        part, chosen = z if mask.all() else z[_on(z, mask)], choices.subset(mask)
        drawn = _filtered(part, chosen, width) if width else gumbel(part, None, *_key(z, chosen))
        tokens[_on(z, mask)] = drawn
    return tokens.clamp_(max=z.shape[-1] - 1)  # logits of NaN draw nothing; what they give must still be an id


def _first_width(choices: Choices, vocab: int) -> Ints:
    """How many candidates each row begins with: enough for its top_k, or a guess for top_p."""
    places = np.searchsorted(WIDTHS, np.where(choices.top_k > 0, choices.top_k, WIDTHS[1]))
    return np.array([*WIDTHS, vocab])[places]


def _filtered(z: Tensor, choices: Choices, width: int) -> Tensor:
    """Draw within top_k and top_p, looking at the best `width` tokens, or at more if those don't suffice."""
    vocab = z.shape[-1]
    width = min(width, vocab)
    best, ids = top_k(z, width)
    most = np.where(choices.top_k > 0, choices.top_k, vocab)
    within = torch.arange(width, device=z.device) < _on(z, most)[:, None]
    best = best.masked_fill(~within, -torch.inf)
    done = (most <= width) | (width == vocab)
    limited = choices.top_p < 1
    if limited.any():
        limits = np.where(limited, choices.top_p, np.inf)
        kept, complete = top_p(best, _on(z, limits), _mass(z, best, most, width))
        best = best.masked_fill(~kept, -torch.inf)
        done |= complete.cpu().numpy() & (most == vocab)  # else the mass that top_k leaves is not known yet
    if done.all():
        return gumbel(best, ids, *_key(z, choices))
    tokens = torch.empty(len(z), dtype=torch.int64, device=z.device)
    if done.any():
        found = _on(z, done)
        tokens[found] = gumbel(best[found], ids[found], *_key(z, choices.subset(done)))
    more = _on(z, ~done)
    wider = next((wider for wider in WIDTHS if wider > width), vocab)
    tokens[more] = _filtered(z[more], choices.subset(~done), wider)
    return tokens


def _mass(z: Tensor, best: Tensor, most: Ints, width: int) -> Tensor:
    """Σ exp(z) over the tokens that top_k leaves, (N,) float64; of no use where those are beyond `width`."""
    inside = best.double().exp().sum(-1)
    if (most <= width).all():
        return inside
    return torch.where(_on(z, most <= width), inside, z.exp().sum(-1, dtype=torch.float64))


def _key(z: Tensor, choices: Choices) -> tuple[Tensor, Tensor, Tensor]:
    return _on(z, choices.seeds), _on(z, choices.samples), _on(z, choices.positions)


def _on(like: Tensor, array: npt.NDArray[np.generic]) -> Tensor:
    return torch.from_numpy(array).to(like.device)
