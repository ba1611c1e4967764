"""The decoder: one forward pass over a ragged batch, for any spec.

It knows tensors only. A row of the batch is tokens at consecutive positions whose keys and values go to given places
of the cache; how many there are makes no difference here.
"""

from typing import NamedTuple

import torch
from torch import Tensor

from kernels.load import Ops
from services.worker.models.causal_lm import Inputs, Shape
from services.worker.models.spec import DecoderSpec, Rope


class Linear(NamedTuple):
    weight: Tensor
    bias: Tensor | None


class Norm(NamedTuple):
    weight: Tensor
    bias: Tensor | None


class Layer(NamedTuple):
    attention_norm: Norm
    qkv: Linear
    out: Linear
    mlp_norm: Norm
    up: Linear
    down: Linear


class Decoder:
    """A model's weights and its forward pass.

    `weights` is emptied on the way: what the kernels keep in a layout of their own must not be there twice.
    """

    def __init__(self, spec: DecoderSpec, weights: dict[str, Tensor], ops: Ops) -> None:
        self.spec = spec
        self._ops = ops
        self._embedding = weights.pop("embedding.weight")
        self._head = ops.pack_linear(self._embedding if spec.tied else weights.pop("head.weight"))
        self._positions = weights.pop("positions.weight", None)
        self._project_in = _linear(weights, "project_in", ops) if "project_in.weight" in weights else None
        self._project_out = _linear(weights, "project_out", ops) if "project_out.weight" in weights else None
        self._final_norm = _norm(weights, "final_norm") if spec.final_norm else None
        self._layers = [_layer(weights, f"layers.{index}.", ops) for index in range(spec.num_layers)]
        self._angles: tuple[Tensor, Tensor] | None = None

    @property
    def shape(self) -> Shape:
        return self.spec.shape

    def reach(self, length: int) -> None:
        """Be ready for positions below `length`."""
        if self.spec.rope:
            self._angles = rope_table(self.spec.rope, length, self._embedding.device)

    def forward(self, inputs: Inputs, caches: list[tuple[Tensor, Tensor]]) -> Tensor:
        """Hidden states (T, H) of all tokens, before the last norm; their keys and values are put in `caches`."""
        x = self._embed(inputs)
        rotation = None
        if self._angles:
            cos, sin = self._angles
            rotation = (self._ops.embedding(inputs.positions, cos), self._ops.embedding(inputs.positions, sin))
        blocks = self._blocks_norm_first if self.spec.norm_first else self._blocks_norm_last
        return blocks(x, inputs, caches, rotation)

    def logits(self, hidden: Tensor) -> Tensor:
        """(N, V) float32 of hidden states (N, H) that `forward` gave."""
        if self._final_norm:
            hidden = self._norm(hidden, self._final_norm)
        if self._project_out is not None:
            hidden = self._ops.linear(hidden, *self._project_out)
        return self._ops.linear(hidden, self._head, None).float()

    def _embed(self, inputs: Inputs) -> Tensor:
        x = self._ops.embedding(inputs.tokens, self._embedding)
        if self._project_in is not None:
            x = self._ops.linear(x, *self._project_in)
        if self._positions is not None:
            x = x + self._ops.embedding(inputs.positions + (self.spec.learned_positions or 0), self._positions)
        return x

    def _blocks_norm_first(
        self, x: Tensor, inputs: Inputs, caches: list[tuple[Tensor, Tensor]], rotation: tuple[Tensor, Tensor] | None
    ) -> Tensor:
        """x + f(norm(x)), twice a layer. Sum and norm are one operation: `part` is what has yet to be added to `x`."""
        part: Tensor | None = None
        for layer, cache in zip(self._layers, caches, strict=True):
            normed, x = self._add_norm(part, x, layer.attention_norm)
            part = self._attention(normed, layer, inputs, cache, rotation)
            normed, x = self._add_norm(part, x, layer.mlp_norm)
            part = self._mlp(normed, layer)
        return x if part is None else x + part

    def _blocks_norm_last(
        self, x: Tensor, inputs: Inputs, caches: list[tuple[Tensor, Tensor]], rotation: tuple[Tensor, Tensor] | None
    ) -> Tensor:
        """norm(x + f(x)), twice a layer."""
        for layer, cache in zip(self._layers, caches, strict=True):
            x, _ = self._add_norm(self._attention(x, layer, inputs, cache, rotation), x, layer.attention_norm)
            x, _ = self._add_norm(self._mlp(x, layer), x, layer.mlp_norm)
        return x

    def _attention(
        self,
        x: Tensor,
        layer: Layer,
        inputs: Inputs,
        cache: tuple[Tensor, Tensor],
        rotation: tuple[Tensor, Tensor] | None,
    ) -> Tensor:
        spec, keys_end = self.spec, self.spec.num_heads + self.spec.num_kv_heads
        qkv = self._ops.linear(x, *layer.qkv).view(len(x), -1, spec.head_dim)
        qk = qkv[:, :keys_end]
        if rotation:
            qk = self._ops.rotary(qk, *rotation)
        self._ops.write_kv(qk[:, spec.num_heads :], qkv[:, keys_end:], *cache, inputs.slots)
        out = self._ops.paged_attention(qk[:, : spec.num_heads], *cache, inputs.attention, scale=spec.scale)
        return self._ops.linear(out.flatten(1), *layer.out)

    def _mlp(self, x: Tensor, layer: Layer) -> Tensor:
        x = self._ops.linear(x, *layer.up)
        x = self._ops.silu_and_mul(x) if self.spec.activation == "silu_and_mul" else x.relu_()
        return self._ops.linear(x, *layer.down)

    def _norm(self, x: Tensor, norm: Norm) -> Tensor:
        if self.spec.norm == "rms":
            return self._ops.rms_norm(x, norm.weight, self.spec.norm_eps)
        return self._ops.layer_norm(x, norm.weight, norm.bias, self.spec.norm_eps)

    def _add_norm(self, part: Tensor | None, x: Tensor, norm: Norm) -> tuple[Tensor, Tensor]:
        """(norm of the sum, the sum)."""
        if part is None:
            return self._norm(x, norm), x
        if self.spec.norm == "rms":
            return self._ops.add_rms_norm(part, x, norm.weight, self.spec.norm_eps)
        return self._ops.add_layer_norm(part, x, norm.weight, norm.bias, self.spec.norm_eps)


def rope_table(rope: Rope, length: int, device: torch.device) -> tuple[Tensor, Tensor]:
    """Cosines and sines (length, R) float32, both halves of the R dimensions equal."""
    frequencies = torch.tensor(rope.inverse_frequencies, dtype=torch.float32)
    angles = torch.outer(torch.arange(length, dtype=torch.float32), frequencies)
    angles = torch.cat((angles, angles), -1)
    return (angles.cos() * rope.magnitude).to(device), (angles.sin() * rope.magnitude).to(device)


def _layer(weights: dict[str, Tensor], prefix: str, ops: Ops) -> Layer:
    return Layer(
        _norm(weights, prefix + "attention_norm"),
        _linear(weights, prefix + "qkv", ops),
        _linear(weights, prefix + "out", ops),
        _norm(weights, prefix + "mlp_norm"),
        _linear(weights, prefix + "up", ops),
        _linear(weights, prefix + "down", ops),
    )


def _linear(weights: dict[str, Tensor], name: str, ops: Ops) -> Linear:
    return Linear(ops.pack_linear(weights.pop(name + ".weight")), weights.pop(name + ".bias", None))


def _norm(weights: dict[str, Tensor], name: str) -> Norm:
    return Norm(weights.pop(name + ".weight"), weights.pop(name + ".bias", None))
