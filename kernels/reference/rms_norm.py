"""y = x / sqrt(mean(x²) + eps) * weight, optionally of x + residual."""

import torch
from torch import Tensor


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """`x` (..., H), `weight` (H,) in `x`'s dtype or float32: the product's, before it is rounded to `x`'s."""
    wide = x.float()
    scale = torch.rsqrt(wide.square().mean(-1, keepdim=True).add_(eps))
    return (wide * scale).to(weight.dtype).mul_(weight).to(x.dtype)


def add_rms_norm(x: Tensor, residual: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """(norm of the sum, the sum): what a pre-norm block needs at each of its joints. Both inputs (..., H)."""
    total = x + residual
    return rms_norm(total, weight, eps), total
