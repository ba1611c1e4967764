"""Draw from softmax(z) as argmax(z + Gumbel noise), with noise only where it can matter.

Noise is within ±MAX_NOISE. So once a few likely tokens have theirs, a token more than that below the best of them
cannot win, whatever its noise: skipping it changes nothing, and what is left is a small part of a vocabulary.
"""

import torch
from torch import Tensor

from kernels.reference.philox import MAX_NOISE, token_noise

_FIRST = 64  # tokens that get noise at once
_MARGIN = MAX_NOISE + 0.06  # covers the rounding of z + noise


def gumbel(z: Tensor, ids: Tensor | None, seeds: Tensor, samples: Tensor, positions: Tensor) -> Tensor:
    """The drawn ids (S,) int64; of equal scores the lowest id wins.

    `z` (S, C) scaled logits, -inf where a token is excluded; `ids` (S, C) their token ids, or None if they are the
    columns' numbers; `seeds`, `samples`, `positions` (S,) int64: see `token_noise`.
    """
    width = z.shape[-1]
    first, columns = torch.topk(z, min(_FIRST, width), dim=-1, sorted=False)
    tokens = columns if ids is None else ids.gather(-1, columns)
    score = first.double() + token_noise(seeds[:, None], samples[:, None], positions[:, None], tokens)
    best = score.amax(-1)
    winner = torch.where(score == best[:, None], tokens, torch.iinfo(torch.int64).max).amin(-1)
    if width <= _FIRST:
        return winner
    return _with_the_rest(z, ids, (seeds, samples, positions), columns, best, winner)


def _with_the_rest(
    z: Tensor, ids: Tensor | None, key: tuple[Tensor, Tensor, Tensor], done: Tensor, best: Tensor, winner: Tensor
) -> Tensor:
    """Try the tokens outside the columns `done` that could still beat `best` (S,), or tie with it at a lower id."""
    seeds, samples, positions = key
    within = z >= (best[:, None] - _MARGIN)
    rows, columns = within.scatter_(1, done, False).nonzero(as_tuple=True)
    tokens = columns if ids is None else ids[rows, columns]
    score = z[rows, columns].double() + token_noise(seeds[rows], samples[rows], positions[rows], tokens)
    top = best.scatter_reduce(0, rows, score, "amax")
    rival = torch.where(score == top[rows], tokens, torch.iinfo(torch.int64).max)
    winner = torch.where(top > best, torch.iinfo(torch.int64).max, winner)
    return winner.scatter_reduce(0, rows, rival, "amin")
