"""Sampling with Gumbel noise: Philox random bits, noise computed from them, and sampling from softmax(z).

The noise of a token is a pure function of (seed, sample, position, token). There is no state, so it depends neither on
the time nor on other rows.
"""

import torch
from torch import Tensor

REACH = 8.0
"""Nats below the likeliest token within which each token has its own noise."""

TAIL = 2**31
"""The tail of level l has the noise of token id TAIL + l. No vocabulary has these ids."""

_ROUNDS = 10
_MULTIPLIERS = (0xD2511F53, 0xCD9E8D57)
_KEY_INCREMENTS = (0x9E3779B9, 0xBB67AE85)
_MASK = 0xFFFFFFFF
_NO_TOKEN = torch.iinfo(torch.int64).max


def philox(counter: tuple[Tensor, Tensor, Tensor, Tensor], key: tuple[Tensor, Tensor]) -> tuple[Tensor, ...]:
    """Return the four random words of Philox4x32-10, int64 tensors of values in [0, 2³²).

    The six words of counter and key are int64 tensors of such values, broadcast together. Salmon, Moraes, Dror, Shaw,
    "Parallel random numbers: as easy as 1, 2, 3" (SC 2011).

    The product of two words may overflow int64. Both of its halves are still right: overflow keeps the low 64 bits,
    and the mask removes the sign bits of the arithmetic shift.
    """
    c0, c1, c2, c3 = counter
    k0, k1 = key
    for _ in range(_ROUNDS):
        even, odd = c0 * _MULTIPLIERS[0], c2 * _MULTIPLIERS[1]
        c0, c1, c2, c3 = _high(odd) ^ c1 ^ k0, odd & _MASK, _high(even) ^ c3 ^ k1, even & _MASK
        k0, k1 = (k0 + _KEY_INCREMENTS[0]) & _MASK, (k1 + _KEY_INCREMENTS[1]) & _MASK
    return c0, c1, c2, c3


def _high(product: Tensor) -> Tensor:
    return (product >> 32) & _MASK


def token_noise(seeds: Tensor, samples: Tensor, positions: Tensor, tokens: Tensor) -> Tensor:
    """Return Gumbel noise of tokens, -log(-log(u)) in float64, with u uniform on (0, 1).

    All arguments are int64, broadcast together; a seed is any 64 bits. The key is the seed's two words, the counter is
    (token, output position, sample, 0). `u` is (k + 1/2) / 2²³ with k of 23 bits, so the noise lies within ±16.64.
    Float64 makes the rounding of a logarithm, which may differ from one vector width to another, irrelevant.
    """
    key = (seeds & _MASK, (seeds >> 32) & _MASK)
    word = philox((tokens, positions, samples, torch.zeros_like(samples)), key)[0]
    uniform = ((word >> 9).double() + 0.5) * 2.0**-23
    return -torch.log(-torch.log(uniform))


def gumbel(z: Tensor, ids: Tensor | None, seeds: Tensor, samples: Tensor, positions: Tensor) -> Tensor:
    """Draw a token of each row from softmax(z); return ids (S,) int64. A row without any finite z gives no valid id.

    `z` (S, C) are scaled logits, each row's maximum at 0, -inf where a token is excluded; `ids` (S, C) their token ids,
    or None if they are the columns' numbers; `seeds`, `samples`, `positions` (S,) int64: see `token_noise`.

    The result is argmax(z + noise), the lowest id for equal scores. Only likely tokens get their own noise, since
    random bits are most of the cost. The maximum of z + noise over many tokens has the same distribution as that of
    one token whose weight is the sum of theirs. So all tokens more than `REACH` below the likeliest compete as one,
    the tail. If the tail wins, which is rare, one of its tokens is drawn in the same way. The distribution is exact.
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
    tail_wins = (tail > best).nonzero()[:, 0]
    if len(tail_wins):
        rest = z[tail_wins].masked_fill_(likely[tail_wins], -torch.inf)
        rest -= rest.amax(-1, keepdim=True)
        rest_key = (seeds[tail_wins], samples[tail_wins], positions[tail_wins])
        winner[tail_wins] = _draw(rest, None if ids is None else ids[tail_wins], rest_key, level + 1)
    return winner
