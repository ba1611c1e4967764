"""gelu, by way of tanh, from operations whose bits don't hang on an element's place: see `silu_and_mul`."""

import math

from torch import Tensor


def gelu_tanh(x: Tensor) -> Tensor:
    """As the reference."""
    wide = x.float()
    inner = wide.square().mul_(0.044715).add_(1).mul_(wide).mul_(math.sqrt(2 / math.pi))
    return inner.tanh_().add_(1).mul_(wide).mul_(0.5).to(x.dtype)


def gelu_tanh_and_mul(gate_up: Tensor) -> Tensor:
    """As the reference."""
    gate, up = gate_up.chunk(2, -1)
    return gelu_tanh(gate).mul_(up)
