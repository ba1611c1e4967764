"""y = x Wᵀ + b."""

import torch.nn.functional as F
from torch import Tensor


def linear(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """`x` (T, in), `weight` (out, in) as checkpoints store it, `bias` (out,); gives (T, out) of `x`'s dtype."""
    return F.linear(x, weight, bias)
