"""transformers' linear modules, computed by our product.

It is faster on a CPU, and a row's bits don't hang on its batch (kernels/cpu/csrc/linear.cpp). Modules are swapped one
by one and their weights dropped, so that there is never a second copy of a model. What multiplies without such a
module, as experts whose weights are one tensor, stays as it is.
"""

from typing import Any

import torch
from torch import Tensor, nn

from kernels.ops import Ops


class PackedLinear(nn.Module):
    """y = x Wᵀ + b over the last dimension of `x`."""

    def __init__(self, packed: Any, bias: Tensor | None, outputs: int, dtype: torch.dtype, ops: Ops) -> None:
        super().__init__()
        self._packed, self.bias, self.out_features = packed, bias, outputs
        self._dtype, self._ops = dtype, ops

    @property
    def weight(self) -> Tensor:
        """The plain weight (out, in), made anew: for modelling code that looks at it."""
        return self._ops.embedding(torch.arange(self.out_features), self._packed).to(self._dtype)

    def forward(self, x: Tensor) -> Tensor:
        """`x` (..., in); gives (..., out)."""
        if not x.numel():
            return x.new_zeros(*x.shape[:-1], self.out_features)
        rows = self._ops.linear(x.reshape(-1, x.shape[-1]), self._packed, self.bias)
        return rows.view(*x.shape[:-1], self.out_features)


def pack_modules(model: nn.Module, ops: Ops) -> None:
    """Swap every linear module of `model` whose weight the kernels lay out in their own way."""
    from transformers.pytorch_utils import Conv1D

    swapped: dict[nn.Module, nn.Module] = {}
    for parent in list(model.modules()):
        for name, child in list(parent.named_children()):
            if child not in swapped and type(child) in (nn.Linear, Conv1D):
                swapped[child] = _packed(child, ops)
            if child in swapped:
                setattr(parent, name, swapped[child])


def _packed(module: nn.Module, ops: Ops) -> nn.Module:
    weight, bias = module.weight, module.bias
    if not isinstance(weight, Tensor):
        return module
    plain = weight.detach() if isinstance(module, nn.Linear) else weight.detach().T
    packed = ops.pack_linear(plain)
    if packed is plain:
        return module
    module.register_parameter("weight", None)  # the module itself is known to `swapped` for a while yet
    return PackedLinear(packed, bias.detach() if isinstance(bias, Tensor) else None, len(plain), plain.dtype, ops)
