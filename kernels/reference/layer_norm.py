"""y = (x - mean(x)) / sqrt(var(x) + eps) * weight + bias, optionally of x + residual."""

import torch.nn.functional as F
from torch import Tensor


def layer_norm(x: Tensor, weight: Tensor, bias: Tensor | None, eps: float) -> Tensor:
    """`x` (..., H), `weight` and `bias` (H,); statistics over the last dimension, in float32."""
    return F.layer_norm(x, (x.shape[-1],), weight, bias, eps)


def add_layer_norm(
    x: Tensor, residual: Tensor, weight: Tensor, bias: Tensor | None, eps: float
) -> tuple[Tensor, Tensor]:
    """(norm of the sum, the sum). Both inputs (..., H)."""
    total = x + residual
    return layer_norm(total, weight, bias, eps), total
