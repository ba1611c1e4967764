"""y = x Wᵀ + b."""

import torch.nn.functional as F
from torch import Tensor


def pack_linear(weight: Tensor) -> Tensor:
    """The form in which `linear` wants a weight (out, in): here, as it is."""
    return weight


def linear(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """`x` (T, in), `weight` (out, in) as checkpoints store it, `bias` (out,); gives (T, out) of `x`'s dtype."""
    return F.linear(x, weight, bias)
