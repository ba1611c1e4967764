"""The small parts of a decoder: where parameters come from, matrix products, norms."""

from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor

from kernels.decoder_layers import Projection
from kernels.ops import Ops
from kernels.quantized import QuantizedWeight
from services.worker.models.causal_lm import Inputs
from services.worker.models.spec import DecoderSpec, Rope


class Weights(Protocol):
    """The parameters of a spec, each made when it is taken: so that only one is in memory before it is packed."""

    device: torch.device

    def __contains__(self, name: str) -> bool: ...

    def take(self, name: str) -> Tensor:
        """The parameter called `name`, for the caller to keep. Each can be taken once."""
        ...

    def take_matrix(self, name: str) -> Tensor | QuantizedWeight:
        """As `take`, for one that is only multiplied with, or looked up by rows: it may be of few bits."""
        ...


class Step(NamedTuple):
    """What all layers share in one forward pass."""

    inputs: Inputs
    rotations: dict[Rope, tuple[Tensor, Tensor]]  # cosines and sines (T, R) at the tokens' positions
    angles: dict[Rope, Any]  # of all positions, as attention wants them; nothing if no keys lack a bias


class Linear:
    """y = x Wᵀ + b."""

    def __init__(self, weights: Weights, name: str, ops: Ops) -> None:
        self.weight = ops.pack_linear(weights.take_matrix(f"{name}.weight"))
        self.bias = _vector(weights, f"{name}.bias", ops)
        self._linear = ops.linear

    @property
    def parts(self) -> Projection:
        return Projection(self.weight, self.bias)

    def __call__(self, x: Tensor) -> Tensor:
        return self._linear(x, self.weight, self.bias)


class Norm:
    """The norm of a spec's kind, over the last dimension."""

    def __init__(self, weights: Weights, name: str, spec: DecoderSpec, ops: Ops) -> None:
        self.weight = weights.take(f"{name}.weight")
        if spec.norm == "rms_plus_one":
            self.weight = self.weight.float() + 1  # in a narrower type, 1 would swallow most of it
        self.weight = ops.pack_vector(self.weight)
        self.bias = _vector(weights, f"{name}.bias", ops)
        self._eps = spec.norm_eps
        self._layer = spec.norm == "layer"
        self._ops = ops

    def __call__(self, x: Tensor) -> Tensor:
        if self._layer:
            return self._ops.layer_norm(x, self.weight, self.bias, self._eps)
        return self._ops.rms_norm(x, self.weight, self._eps)

    def add(self, part: Tensor | None, x: Tensor) -> tuple[Tensor, Tensor]:
        """(norm of the sum, the sum); without a `part`, the sum is `x`."""
        if part is None:
            return self(x), x
        if self._layer:
            return self._ops.add_layer_norm(part, x, self.weight, self.bias, self._eps)
        return self._ops.add_rms_norm(part, x, self.weight, self._eps)


def _vector(weights: Weights, name: str, ops: Ops) -> Tensor | None:
    return ops.pack_vector(weights.take(name)) if name in weights else None
