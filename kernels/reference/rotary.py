"""Rotary position embedding, in the form that pairs dimension i with dimension i + R/2.

y = x * cos + rotate(x) * sin, rotate((a, b)) = (-b, a) for the two halves of the first R dimensions
"""

import torch
from torch import Tensor


def rotary(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotate the first R dimensions of each head; the others pass.

    `x` (T, heads, D), of any strides; `cos` and `sin` (T, R) float32 with R ≤ D, both halves equal, the rows of the
    table at each token's position. Computed in float32; gives a new contiguous (T, heads, D) of `x`'s dtype.
    """
    width = cos.shape[-1]
    turned, rest = x[..., :width], x[..., width:]
    wide = turned.float()
    first, second = wide.chunk(2, -1)
    rotated = torch.cat((-second, first), -1)
    result = torch.addcmul(wide * cos[:, None], rotated, sin[:, None]).to(x.dtype)
    return torch.cat((result, rest), -1) if rest.shape[-1] else result
