"""Matmuls with weights, and lookups of their rows."""

import torch.nn.functional as F
from torch import Tensor

from kernels.quantized import FloatWeight, RoundedWeight, Weight


def pack_linear(weight: Weight) -> Tensor:
    """Return the weight as one tensor: unchanged if it is one, and in float32 if it is quantised."""
    if isinstance(weight, Tensor):
        return weight
    if isinstance(weight, RoundedWeight):
        raise TypeError("only the kernels compiled for a CPU round weights")
    return weight.joined() if isinstance(weight, FloatWeight) else weight.dequantize()


def linear(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """y = x Wᵀ + b."""
    return F.linear(x, weight, bias)


def logits(x: Tensor, weight: Tensor) -> Tensor:
    """y = x Wᵀ, rounded to the type of `x` before it is widened to float32."""
    return linear(x, weight).float()


def embedding(ids: Tensor, table: Tensor) -> Tensor:
    """y[t] = table[ids[t]]."""
    return table.index_select(0, ids)
