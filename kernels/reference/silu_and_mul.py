"""y = silu(gate) * up, with silu(v) = v * sigmoid(v)."""

import torch.nn.functional as F
from torch import Tensor


def silu_and_mul(gate_up: Tensor) -> Tensor:
    """`gate_up` (T, 2 I): gate in the first half of the last dimension, up in the second; gives (T, I)."""
    gate, up = gate_up.chunk(2, -1)
    return F.silu(gate).mul_(up)
