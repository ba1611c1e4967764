"""Replaces transformers' linear modules by ones that call Quire's matmul.

It is faster on a CPU, and batch-invariant: the bits of a row do not depend on other rows (kernels/cpu/csrc/linear.cpp).
Modules are replaced one by one and their weights dropped, so that there is never a second copy of a model. Matmuls
outside such modules, for example with experts whose weights are one tensor, are not replaced.
"""

from typing import Any

import torch
from torch import Tensor, nn

from kernels.ops import Ops


class PackedLinear(nn.Module):
    """y = x Wᵀ + b over the last dimension of `x`, with a weight that the kernels have packed."""

    def __init__(self, weight: Tensor, packed: Any, bias: Tensor | None, ops: Ops) -> None:
        """`packed` is `weight` (out, in), which is not kept."""
        super().__init__()
        self._packed, self.bias, self.out_features = packed, bias, len(weight)
        self._dtype, self._device, self._ops = weight.dtype, weight.device, ops

    @property
    def weight(self) -> Tensor:
        """The unpacked weight (out, in), computed at each access, for modelling code that reads it."""
        rows = torch.arange(self.out_features, device=self._device)
        return self._ops.embedding(rows, self._packed).to(self._dtype)

    def forward(self, x: Tensor) -> Tensor:
        """Take `x` (..., in), and return (..., out)."""
        if not x.numel():
            return x.new_zeros(*x.shape[:-1], self.out_features)
        rows = self._ops.linear(x.reshape(-1, x.shape[-1]), self._packed, self.bias)
        return rows.view(*x.shape[:-1], self.out_features)


def pack_modules(model: nn.Module, ops: Ops) -> None:
    """Replace every linear module of `model` whose weight the kernels pack."""
    from transformers.pytorch_utils import Conv1D

    replacements: dict[nn.Module, nn.Module] = {}
    for parent in list(model.modules()):
        for name, child in list(parent.named_children()):
            if child not in replacements and type(child) in (nn.Linear, Conv1D):
                replacements[child] = _pack(child, ops)
            if child in replacements:
                setattr(parent, name, replacements[child])


def _pack(module: nn.Module, ops: Ops) -> nn.Module:
    weight, bias = module.weight, module.bias
    if not isinstance(weight, Tensor):
        return module
    plain = weight.detach() if isinstance(module, nn.Linear) else weight.detach().T
    packed = ops.pack_linear(plain)
    if packed is plain:
        return module
    module.register_parameter("weight", None)  # `replacements` keeps the module alive for a while
    return PackedLinear(plain, packed, bias.detach() if isinstance(bias, Tensor) else None, ops)
