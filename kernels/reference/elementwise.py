"""Norms, activations and rotary positions: operations on each token by itself."""

import torch
import torch.nn.functional as F
from torch import Tensor


def pack_vector(vector: Tensor) -> Tensor:
    """Return the vector unchanged."""
    return vector


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """y = x / sqrt(mean(x²) + eps) * weight, in float32.

    The multiplication by the weight is in the weight's type; the result is rounded to the type of `x`.
    """
    wide = x.float()
    scale = torch.rsqrt(wide.square().mean(-1, keepdim=True).add_(eps))
    return (wide * scale).to(weight.dtype).mul_(weight).to(x.dtype)


def add_rms_norm(x: Tensor, residual: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """Return (rms_norm(x + residual), x + residual)."""
    total = x + residual
    return rms_norm(total, weight, eps), total


def layer_norm(x: Tensor, weight: Tensor, bias: Tensor | None, eps: float) -> Tensor:
    """y = (x - mean(x)) / sqrt(var(x) + eps) * weight + bias, with statistics in float32."""
    return F.layer_norm(x, (x.shape[-1],), weight, bias, eps)


def add_layer_norm(
    x: Tensor, residual: Tensor, weight: Tensor, bias: Tensor | None, eps: float
) -> tuple[Tensor, Tensor]:
    """Return (layer_norm(x + residual), x + residual)."""
    total = x + residual
    return layer_norm(total, weight, bias, eps), total


def silu_and_mul(gate_up: Tensor) -> Tensor:
    """y = silu(gate) * up, with silu(v) = v * sigmoid(v)."""
    gate, up = gate_up.chunk(2, -1)
    return F.silu(gate).mul_(up)


def gelu_tanh(x: Tensor) -> Tensor:
    """y = x / 2 * (1 + tanh(√(2/π) (x + 0.044715 x³)))."""
    return F.gelu(x, approximate="tanh")


def gelu_tanh_and_mul(gate_up: Tensor) -> Tensor:
    """y = gelu_tanh(gate) * up."""
    gate, up = gate_up.chunk(2, -1)
    return gelu_tanh(gate).mul_(up)


def relu(x: Tensor) -> Tensor:
    """y = max(x, 0)."""
    return x.relu()


def rotary(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotate the first R dimensions of each head by its token's angles; the others stay.

    y = x * cos + rotate(x) * sin, with rotate((a, b)) = (-b, a) for the two halves of the R dimensions: dimension i is
    paired with i + R/2. Computed in float32.
    """
    width = cos.shape[-1]
    rotated, rest = x[..., :width], x[..., width:]
    wide = rotated.float()
    first, second = wide.chunk(2, -1)
    result = torch.addcmul(wide * cos[:, None], torch.cat((-second, first), -1), sin[:, None]).to(x.dtype)
    return torch.cat((result, rest), -1) if rest.shape[-1] else result
