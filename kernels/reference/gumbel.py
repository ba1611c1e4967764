"""Draw from softmax(z) as argmax(z + Gumbel noise), with noise only for the likely tokens.

The maximum of many noised tokens is distributed like one noised token whose weight is the sum of theirs. So all that
lies more than `REACH` below the likeliest token takes part as one, "the tail"; only if it wins, which is as seldom as
it is light, is one of it drawn in the same way. The draw is exact, and a few hundred tokens of a vocabulary get noise
instead of all: random bits are what a draw costs.
"""

import torch
from torch import Tensor

from kernels.reference.philox import token_noise

REACH = 8.0  # nats
TAIL = 2**31
"""The tail of level l has the noise of token TAIL + l, which no vocabulary has."""

_NO_TOKEN = torch.iinfo(torch.int64).max


def gumbel(z: Tensor, ids: Tensor | None, seeds: Tensor, samples: Tensor, positions: Tensor) -> Tensor:
    """The drawn ids (S,) int64; of equal scores the lowest id wins. A row without any finite z gives no valid id.

    `z` (S, C) scaled logits, each row's maximum at 0, -inf where a token is excluded; `ids` (S, C) their token ids, or
    None if they are the columns' numbers; `seeds`, `samples`, `positions` (S,) int64: see `token_noise`.
    """
    return _draw(z, ids, (seeds, samples, positions), 0)


def _draw(z: Tensor, ids: Tensor | None, key: tuple[Tensor, Tensor, Tensor], level: int) -> Tensor:
    seeds, samples, positions = key
    likely = z >= -REACH
    rows, columns = likely.nonzero(as_tuple=True)
    tokens = columns if ids is None else ids[rows, columns]
    score = z[rows, columns].double() + token_noise(seeds[rows], samples[rows], positions[rows], tokens)
    best = torch.full((len(z),), -torch.inf, dtype=torch.float64, device=z.device)
    best.scatter_reduce_(0, rows, score, "amax")
    winner = torch.full((len(z),), _NO_TOKEN, device=z.device)
    winner.scatter_reduce_(0, rows, torch.where(score == best[rows], tokens, _NO_TOKEN), "amin")

    weight = z.exp().masked_fill_(likely, 0.0).sum(-1, dtype=torch.float64)
    tail = weight.log() + token_noise(seeds, samples, positions, torch.full_like(seeds, TAIL + level))
    won = (tail > best).nonzero()[:, 0]
    if len(won):
        rest = z[won].masked_fill_(likely[won], -torch.inf)
        rest -= rest.amax(-1, keepdim=True)
        part = (seeds[won], samples[won], positions[won])
        winner[won] = _draw(rest, None if ids is None else ids[won], part, level + 1)
    return winner
