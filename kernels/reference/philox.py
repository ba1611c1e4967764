"""Philox4x32-10: random bits as a pure function of a key and a counter.

Salmon, Moraes, Dror, Shaw, "Parallel random numbers: as easy as 1, 2, 3" (SC 2011). A round multiplies two of the
four counter words by constants, mixes the halves of the products with the other two and the key, and the key moves
on by a Weyl sequence. There is no state: the noise of a token is the same whenever, and beside whomever, it is asked.
"""

import torch
from torch import Tensor

_ROUNDS = 10
_MULTIPLIERS = (0xD2511F53, 0xCD9E8D57)
_KEY_STEPS = (0x9E3779B9, 0xBB67AE85)
_MASK = 0xFFFFFFFF


def philox(counter: tuple[Tensor, Tensor, Tensor, Tensor], key: tuple[Tensor, Tensor]) -> tuple[Tensor, ...]:
    """Four words of random bits for each element of six int64 tensors (broadcast together) of values in [0, 2³²).

    Products of two words wrap around int64; both halves are still read off rightly, for the low 64 bits are what
    wrapping keeps, and the mask undoes the sign of the arithmetic shift.
    """
    c0, c1, c2, c3 = counter
    k0, k1 = key
    for _ in range(_ROUNDS):
        even, odd = c0 * _MULTIPLIERS[0], c2 * _MULTIPLIERS[1]
        c0, c1, c2, c3 = _high(odd) ^ c1 ^ k0, odd & _MASK, _high(even) ^ c3 ^ k1, even & _MASK
        k0, k1 = (k0 + _KEY_STEPS[0]) & _MASK, (k1 + _KEY_STEPS[1]) & _MASK
    return c0, c1, c2, c3


def _high(product: Tensor) -> Tensor:
    return (product >> 32) & _MASK


def token_noise(seeds: Tensor, samples: Tensor, positions: Tensor, tokens: Tensor) -> Tensor:
    """Gumbel noise of tokens, in float64: -log(-log(u)), u uniform on (0, 1).

    All int64, broadcast together; a seed is any 64 bits. The key is the seed's two words, the counter is (token,
    output position, sample, 0). `u` is (k + 1/2) / 2²³ with k of 23 bits, so the noise lies within ±16.64.
    Float64 makes the rounding of a logarithm, which may differ from one vector width to another, irrelevant.
    """
    key = (seeds & _MASK, (seeds >> 32) & _MASK)
    word = philox((tokens, positions, samples, torch.zeros_like(samples)), key)[0]
    uniform = ((word >> 9).double() + 0.5) * 2.0**-23
    return -torch.log(-torch.log(uniform))
