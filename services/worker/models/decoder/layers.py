"""Parts of a decoder: its source of parameters, linear layers and norms."""

from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor

from kernels.decoder_layers import Projection
from kernels.lora import LoraSegments, LoraStack
from kernels.ops import Ops
from kernels.quantized import Weight
from services.worker.models.causal_lm import Inputs
from services.worker.models.spec import DecoderSpec, Rope
from services.worker.rank_group import RankGroup


class Weights(Protocol):
    """The parameters of a spec, or the part of them that a rank has.

    Each is loaded when it is needed, so that no more than one unpacked is in memory.
    """

    device: torch.device
    dtype: torch.dtype  # of those that are not quantised

    def __contains__(self, name: str) -> bool: ...

    def load(self, name: str) -> Tensor:
        """Return the parameter called `name`, for the caller to keep. Load each parameter once."""
        ...

    def load_matrix(self, name: str) -> Weight:
        """Return a matrix for `pack_linear`, which must be called before anything else is loaded."""
        ...


class ForwardContext(NamedTuple):
    """The values that all layers share in one forward pass."""

    inputs: Inputs
    cos_sin: dict[Rope, tuple[Tensor, Tensor]]  # cosines and sines (P, R) of all positions
    angles: dict[Rope, Any]  # of all positions, for `paged_attention`; empty unless a `kv_bias` has keys


class Linear:
    """A linear layer, y = x Wᵀ + b, to which adapters add theirs if it has `lora`.

    With `group`, a rank has some inputs of the layer, and the sum over all ranks is the result.
    """

    def __init__(self, weights: Weights, name: str, ops: Ops, group: RankGroup | None = None) -> None:
        self.weight = ops.pack_linear(weights.load_matrix(f"{name}.weight"))
        self.bias = _vector(weights, f"{name}.bias", ops)
        self.lora: LoraStack | None = None
        self._ops, self._group = ops, group

    @property
    def projection(self) -> Projection:
        return Projection(self.weight, self.bias)

    def __call__(self, x: Tensor, segments: LoraSegments | None = None) -> Tensor:
        y = self._ops.linear(x, self.weight, self.bias)
        if segments and self.lora:
            self._ops.lora_expand(y, self._ops.lora_shrink(x, self.lora, segments), self.lora, segments)
        return self._group.all_reduce(y) if self._group else y


class Norm:
    """The norm that a spec names, over the last dimension."""

    def __init__(self, weights: Weights, name: str, spec: DecoderSpec, ops: Ops) -> None:
        self.weight = weights.load(f"{name}.weight")
        if spec.norm == "rms_plus_one":
            self.weight = self.weight.float() + 1  # in a narrower type, 1 would swallow most of it
        self.weight = ops.pack_vector(self.weight)
        self.bias = _vector(weights, f"{name}.bias", ops)
        self._eps = spec.norm_eps
        self._is_layer_norm = spec.norm == "layer"
        self._ops = ops

    def __call__(self, x: Tensor) -> Tensor:
        if self._is_layer_norm:
            return self._ops.layer_norm(x, self.weight, self.bias, self._eps)
        return self._ops.rms_norm(x, self.weight, self._eps)

    def add(self, x: Tensor | None, residual: Tensor) -> tuple[Tensor, Tensor]:
        """Return the norm of the sum of both, and the sum. Without `x` the sum is `residual`."""
        if x is None:
            return self(residual), residual
        if self._is_layer_norm:
            return self._ops.add_layer_norm(x, residual, self.weight, self.bias, self._eps)
        return self._ops.add_rms_norm(x, residual, self.weight, self._eps)


def _vector(weights: Weights, name: str, ops: Ops) -> Tensor | None:
    return ops.pack_vector(weights.load(name)) if name in weights else None
