"""The attention block of a layer, and the tables of angles by which its queries and keys are rotated."""

from collections.abc import Iterable

import torch
from torch import Tensor

from kernels.load import Ops
from services.worker.models.layers import Linear, Norm, Step, Weights
from services.worker.models.spec import DecoderSpec, LayerSpec, Rope


class Attention:
    """Queries, keys and values of all tokens; keys and values go to the cache, and are read from there."""

    def __init__(self, weights: Weights, prefix: str, layer: LayerSpec, spec: DecoderSpec, ops: Ops) -> None:
        self.layer, self._spec, self._ops = layer, spec, ops
        self.qkv = Linear(weights, f"{prefix}qkv", ops)
        self.q_norm = Norm(weights, f"{prefix}q_norm", spec, ops) if spec.qk_norm else None
        self.k_norm = Norm(weights, f"{prefix}k_norm", spec, ops) if spec.qk_norm else None
        self.out = Linear(weights, f"{prefix}out", ops)

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
        )
        return self.out(out.flatten(1))


class Rotations:
    """The angles of each of a model's ropes, for the positions that were asked for."""

    def __init__(self, layers: Iterable[LayerSpec], ops: Ops) -> None:
        self._ropes = dict.fromkeys(layer.rope for layer in layers if layer.rope)
        self._tables: dict[Rope, tuple[Tensor, Tensor]] = {}
        self._embedding = ops.embedding

    @property
    def ropes(self) -> list[Rope]:
        """In the order in which `at` has them."""
        return list(self._ropes)

    def reach(self, length: int, device: torch.device) -> None:
        """Be ready for positions below `length`."""
        self._tables = {rope: rope_table(rope, length, device) for rope in self._ropes}

    def at(self, positions: Tensor) -> dict[Rope, tuple[Tensor, Tensor]]:
        """Cosines and sines (T, R) at `positions` (T,)."""
        return {
            rope: (self._embedding(positions, cos), self._embedding(positions, sin))
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
