"""The attention block of a layer, and the tables of cosines and sines that rotate its queries and keys."""

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor

from kernels.kv_bias import KVBias
from kernels.layout import has_scales
from kernels.ops import Ops
from services.worker.models.decoder.layers import ForwardContext, Linear, Norm, Weights
from services.worker.models.spec import DecoderSpec, LayerSpec, Rope
from services.worker.rank_group import RankGroup


class Attention:
    """Computes queries, keys and values, writes keys and values to the cache, and computes attention from the cache.

    A cache of quants holds keys and values without their biases, which are then in `kv_bias` instead of `qkv`.
    """

    def __init__(
        self,
        weights: Weights,
        prefix: str,
        layer: LayerSpec,
        spec: DecoderSpec,
        ops: Ops,
        group: RankGroup,
        *,
        kv_dtype: torch.dtype,
    ) -> None:
        self.layer, self._spec, self._ops = layer, spec, ops
        self.qkv = Linear(weights, f"{prefix}qkv", ops)
        self.q_norm = Norm(weights, f"{prefix}q_norm", spec, ops) if spec.qk_norm else None
        self.k_norm = Norm(weights, f"{prefix}k_norm", spec, ops) if spec.qk_norm else None
        self.out = Linear(weights, f"{prefix}out", ops, group)
        self.kv_bias = KVBias()
        if has_scales(kv_dtype) and self.qkv.bias is not None:
            self.qkv.bias, self.kv_bias = _split_bias(self.qkv.bias, layer, spec)

    def __call__(self, x: Tensor, context: ForwardContext, cache: tuple[Tensor, Tensor]) -> Tensor:
        spec, inputs, rope = self._spec, context.inputs, self.layer.rope
        q = self._ops.rotate_and_store(
            self.qkv(x, inputs.lora).view(len(x), -1, spec.head_dim),
            *cache,
            inputs.slot_mapping,
            positions=inputs.positions,
            cos_sin=context.cos_sin[rope] if rope else None,
            norms=(self.q_norm.weight, self.k_norm.weight) if self.q_norm and self.k_norm else None,
            eps=spec.norm_eps,
        )
        out = self._ops.paged_attention(
            q,
            *cache,
            inputs.attention,
            scale=spec.scale,
            window=self.layer.window,
            softcap=spec.attention_softcap,
            bias=self.kv_bias,
            angles=context.angles.get(rope) if rope else None,
        )
        return self.out(out.flatten(1), inputs.lora)


def _split_bias(bias: Tensor, layer: LayerSpec, spec: DecoderSpec) -> tuple[Tensor, KVBias]:
    """Split the bias of queries, keys and values into the bias of `qkv`, and the one that attention adds.

    The bias of keys stays in `qkv` if a norm follows, which is not linear. It also stays if there is a softcap and some
    dimensions are not rotated: `paged_attention` ignores the bias in those, which softmax allows but softcap does not.
    """
    sizes = [spec.num_heads * spec.head_dim, *[spec.num_kv_heads * spec.head_dim] * 2]
    queries, keys, values = torch.split(bias, sizes)
    shape = (spec.num_kv_heads, spec.head_dim)
    rotated = 2 * len(layer.rope.inverse_frequencies) if layer.rope else 0
    keep_key_bias = spec.qk_norm or (spec.attention_softcap and rotated < spec.head_dim)
    qkv_bias = torch.cat((queries, keys if keep_key_bias else torch.zeros_like(keys), torch.zeros_like(values)))
    key_bias = None if keep_key_bias else keys.float().reshape(shape).clone()
    return qkv_bias, KVBias(key_bias, values.float().reshape(shape).clone())


class RotaryTables:
    """Cosines and sines of each of a model's ropes, for the positions below a length."""

    def __init__(self, layers: Iterable[LayerSpec], ops: Ops, *, packed: bool) -> None:
        """`packed`: attention also needs the angles of all positions, to add the bias of keys."""
        self._ropes = dict.fromkeys(layer.rope for layer in layers if layer.rope)
        self._ops, self._packed = ops, packed
        self.cos_sin: dict[Rope, tuple[Tensor, Tensor]] = {}
        """Cosines and sines (P, R) float32 of each rope, in the order of `ropes`."""
        self.angles: dict[Rope, Any] = {}
        """The angles of each rope as `paged_attention` takes them, in the order of `ropes`; empty if not `packed`."""

    @property
    def ropes(self) -> list[Rope]:
        """The distinct ropes, in the order of their layers."""
        return list(self._ropes)

    def build(self, length: int, device: torch.device) -> None:
        """Compute the tables for positions below `length`."""
        self.cos_sin = {rope: rope_table(rope, length, device) for rope in self._ropes}
        if self._packed:
            self.angles = {rope: self._ops.pack_angles(*table) for rope, table in self.cos_sin.items()}


def rope_table(rope: Rope, length: int, device: torch.device) -> tuple[Tensor, Tensor]:
    """Return cosines and sines (length, R) float32. Both halves of the R dimensions are equal.

    Contexts have up to `length - 1` tokens. The last position is for the token after the longest context, which is
    dropped.
    """
    is_long = rope.long_inverse_frequencies and length - 1 > rope.original_max_positions
    inverse_frequencies = rope.long_inverse_frequencies if is_long else rope.inverse_frequencies
    positions = torch.arange(length, dtype=torch.float32)
    angles = torch.outer(positions, torch.tensor(inverse_frequencies, dtype=torch.float32))
    angles = torch.cat((angles, angles), -1)
    cos, sin = angles.cos() * rope.attention_factor, angles.sin() * rope.attention_factor
    return cos.to(device), sin.to(device)
