"""y = x Wᵀ + b."""

import torch.nn.functional as F
from torch import Tensor

from kernels.quantized import QuantizedWeight


def pack_linear(weight: Tensor | QuantizedWeight) -> Tensor:
    """The form in which `linear` wants a weight (out, in): here, as it is; one of few bits in float32."""
    return weight.dequantize() if isinstance(weight, QuantizedWeight) else weight


def linear(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """`x` (T, in), `weight` (out, in) as checkpoints store it, `bias` (out,); gives (T, out) of `x`'s dtype."""
    return F.linear(x, weight, bias)


def pack_vector(vector: Tensor) -> Tensor:
    """The form in which norms and sums want a weight or a bias (H,): here, as it is."""
    return vector
