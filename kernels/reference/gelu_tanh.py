"""y = gelu(x), optionally gelu(gate) * up, with gelu(v) = v / 2 * (1 + tanh(√(2/π) (v + 0.044715 v³)))."""

import torch.nn.functional as F
from torch import Tensor


def gelu_tanh(x: Tensor) -> Tensor:
    """`x` of any shape."""
    return F.gelu(x, approximate="tanh")


def gelu_tanh_and_mul(gate_up: Tensor) -> Tensor:
    """`gate_up` (T, 2 I): gate in the first half of the last dimension, up in the second; gives (T, I)."""
    gate, up = gate_up.chunk(2, -1)
    return gelu_tanh(gate).mul_(up)
