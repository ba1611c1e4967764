"""Norms, gated activations and rotary positions: csrc/elementwise.cpp.

They compute in float32. Rows that are not float32 and contiguous are converted first.
"""

import torch
from torch import Tensor


def pack_vector(vector: Tensor) -> Tensor:
    """Return the vector in float32."""
    return vector.float()


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """y = x / sqrt(mean(x²) + eps) * weight."""
    wide = x.float().contiguous()
    y = torch.empty_like(wide)
    torch.ops.quire.add_rms_norm(wide, None, weight.float(), eps, y, wide)
    return y.to(x.dtype)


def add_rms_norm(x: Tensor, residual: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """Return (rms_norm(x + residual), x + residual)."""
    wide = x.float().contiguous()
    y, total = torch.empty_like(wide), torch.empty_like(wide)
    torch.ops.quire.add_rms_norm(wide, residual.float().contiguous(), weight.float(), eps, y, total)
    return y.to(x.dtype), total.to(x.dtype)


def silu_and_mul(gate_up: Tensor) -> Tensor:
    """y = silu(gate) * up."""
    return _activation(gate_up, gate_up.shape[-1] // 2, gelu=False)


def gelu_tanh_and_mul(gate_up: Tensor) -> Tensor:
    """y = gelu_tanh(gate) * up."""
    return _activation(gate_up, gate_up.shape[-1] // 2, gelu=True)


def gelu_tanh(x: Tensor) -> Tensor:
    """y = gelu_tanh(x)."""
    return _activation(x, x.shape[-1], gelu=True)


def rotary(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotate the first R dimensions of each head by its token's angles; the others stay."""
    wide = x.float()
    y = wide.new_empty(wide.shape)
    torch.ops.quire.rotary(wide, cos.contiguous(), sin.contiguous(), y)
    return y.to(x.dtype)


def _activation(x: Tensor, width: int, *, gelu: bool) -> Tensor:
    wide = x.float().contiguous()
    y = wide.new_empty(*wide.shape[:-1], width)
    torch.ops.quire.activation(wide, gelu, y)
    return y.to(x.dtype)
