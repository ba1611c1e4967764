"""The attention block of a layer, and the tables of angles by which its queries and keys are rotated."""

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor

from kernels.kv_bias import KVBias
from kernels.ops import Ops
from services.worker.models.decoder.layers import Linear, Norm, Step, Weights
from services.worker.models.spec import DecoderSpec, LayerSpec, Rope


class Attention:
    """Queries, keys and values of all tokens; keys and values go to the cache, and are read from there.

    In a cache of eight bits they lie without their biases, which are then no part of `qkv`.
    """

    def __init__(
        self, weights: Weights, prefix: str, layer: LayerSpec, spec: DecoderSpec, ops: Ops, *, kv_dtype: torch.dtype
    ) -> None:
        self.layer, self._spec, self._ops = layer, spec, ops
        self.qkv = Linear(weights, f"{prefix}qkv", ops)
        self.q_norm = Norm(weights, f"{prefix}q_norm", spec, ops) if spec.qk_norm else None
        self.k_norm = Norm(weights, f"{prefix}k_norm", spec, ops) if spec.qk_norm else None
        self.out = Linear(weights, f"{prefix}out", ops)
        self.kv_bias = KVBias()
        if kv_dtype == torch.int8 and self.qkv.bias is not None:
            self.qkv.bias, self.kv_bias = _without_kv(self.qkv.bias, layer, spec)

    def __call__(self, x: Tensor, step: Step, cache: tuple[Tensor, Tensor]) -> Tensor:
        spec, heads = self._spec, self._spec.num_heads
        qkv = self.qkv(x).view(len(x), -1, spec.head_dim)
        qk, v = qkv[:, : heads + spec.num_kv_heads], qkv[:, heads + spec.num_kv_heads :]
        if self.q_norm and self.k_norm:
            qk = torch.cat((self.q_norm(qk[:, :heads]), self.k_norm(qk[:, heads:])), 1)
        if self.layer.rope:
            qk = self._ops.rotary(qk, *step.rotations[self.layer.rope])
        self._ops.write_kv(qk[:, heads:], v, *cache, step.inputs.slots)
        out = self._ops.paged_attention(
            qk[:, :heads],
            *cache,
            step.inputs.attention,
            scale=spec.scale,
            window=self.layer.window,
            softcap=spec.attention_softcap,
            bias=self.kv_bias,
            angles=step.angles.get(self.layer.rope) if self.layer.rope else None,
        )
        return self.out(out.flatten(1))


def _without_kv(bias: Tensor, layer: LayerSpec, spec: DecoderSpec) -> tuple[Tensor, KVBias]:
    """Split the bias of queries, keys and values into one without the part of keys and values, and that part.

    Keys keep theirs if a norm follows, which is not linear, and with a softcap unless all dimensions are rotated: it
    would see what `paged_attention` then leaves out.
    """
    sizes = [spec.num_heads * spec.head_dim, *[spec.num_kv_heads * spec.head_dim] * 2]
    queries, keys, values = torch.split(bias, sizes)
    shape = (spec.num_kv_heads, spec.head_dim)
    rotated = 2 * len(layer.rope.inverse_frequencies) if layer.rope else 0
    stays = spec.qk_norm or (spec.attention_softcap and rotated < spec.head_dim)
    kept = torch.cat((queries, keys if stays else torch.zeros_like(keys), torch.zeros_like(values)))
    apart = None if stays else keys.float().reshape(shape).clone()
    return kept, KVBias(apart, values.float().reshape(shape).clone())


class Rotations:
    """The angles of each of a model's ropes, for the positions that were asked for."""

    def __init__(self, layers: Iterable[LayerSpec], ops: Ops, *, packed: bool) -> None:
        """`packed` says whether attention needs the angles of all positions, since keys lack a bias."""
        self._ropes = dict.fromkeys(layer.rope for layer in layers if layer.rope)
        self._tables: dict[Rope, tuple[Tensor, Tensor]] = {}
        self._ops, self._packed = ops, packed
        self.angles: dict[Rope, Any] = {}
        """Each rope's angles as attention takes them, in the order of `ropes`; empty if it needs none."""

    @property
    def ropes(self) -> list[Rope]:
        """In the order in which `at` has them."""
        return list(self._ropes)

    def reach(self, length: int, device: torch.device) -> None:
        """Be ready for positions below `length`."""
        self._tables = {rope: rope_table(rope, length, device) for rope in self._ropes}
        if self._packed:
            self.angles = {rope: self._ops.pack_angles(*table) for rope, table in self._tables.items()}

    def at(self, positions: Tensor) -> dict[Rope, tuple[Tensor, Tensor]]:
        """Cosines and sines (T, R) at `positions` (T,)."""
        return {
            rope: (self._ops.embedding(positions, cos), self._ops.embedding(positions, sin))
            for rope, (cos, sin) in self._tables.items()
        }


def rope_table(rope: Rope, length: int, device: torch.device) -> tuple[Tensor, Tensor]:
    """Cosines and sines (length, R) float32, both halves of the R dimensions equal.

    Contexts have up to `length - 1` tokens: the last place is for one that is sampled behind the longest, and dropped.
    """
    long = rope.long_inverse_frequencies and length - 1 > rope.short_positions
    chosen = rope.long_inverse_frequencies if long else rope.inverse_frequencies
    frequencies = torch.tensor(chosen, dtype=torch.float32)
    angles = torch.outer(torch.arange(length, dtype=torch.float32), frequencies)
    angles = torch.cat((angles, angles), -1)
    return (angles.cos() * rope.magnitude).to(device), (angles.sin() * rope.magnitude).to(device)
