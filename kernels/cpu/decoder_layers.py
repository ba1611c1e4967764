"""All layers of a decoder in one call: csrc/decoder_layers.cpp, which explains why.

The results are equal to those of the single operations, bit for bit.
"""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from kernels.cpu.attention import AttentionPlan
from kernels.cpu.linear import (
    PackedChannelWeight,
    PackedQuantizedWeight,
    PackedTableWeight,
    ReorderedWeight,
)
from kernels.decoder_layers import DecoderLayer, LayerConfig, Projection
from kernels.lora import LoraSegments, LoraStack

ACTIVATIONS = ("silu_and_mul", "gelu_tanh_and_mul", "gelu_tanh")
_NO_SEGMENTS = torch.empty(0, dtype=torch.int64)
PANEL = 32  # outputs of a panel; inner sizes of feed-forward blocks are multiples of it

Caches = Sequence[tuple[Tensor, Tensor]]
Tables = Sequence[tuple[Tensor, Tensor]]


def fuse_layers(config: LayerConfig, layers: Sequence[DecoderLayer]) -> Callable[..., Tensor] | None:
    """Return the layers as one operation, or None if it does not support them."""
    if config.activation not in ACTIVATIONS or not all(_is_supported(layer) for layer in layers):
        return None
    fused = torch.classes.quire.DecoderLayers(config._asdict())
    for layer in layers:
        fields = layer._asdict()
        lora = fields.pop("lora")
        fused.add({name: _to_native(value, lora.get(name)) for name, value in fields.items()})

    def forward(
        x: Tensor,
        caches: Caches,
        slot_mapping: Tensor,
        plan: AttentionPlan,
        positions: Tensor,
        tables: Tables,
        angles: Sequence[Tensor] = (),
        segments: LoraSegments | None = None,
        outputs: Tensor | None = None,
    ) -> Tensor:
        keys, values = zip(*caches, strict=True)
        cosines = [cos.index_select(0, positions) for cos, _ in tables]
        sines = [sin.index_select(0, positions) for _, sin in tables]
        adapters = segments[:2] if segments else (_NO_SEGMENTS, _NO_SEGMENTS)
        rotations = cosines, sines, list(angles)
        hidden: Tensor = fused.forward(x, keys, values, slot_mapping, *plan, *rotations, *adapters, outputs)
        return hidden

    return forward


def _is_supported(layer: DecoderLayer) -> bool:
    weights = [projection.weight for projection in (layer.qkv, layer.out, layer.up, layer.down)]
    return not any(isinstance(weight, ReorderedWeight) for weight in weights) and layer.down.weight.inputs % PANEL == 0


def _to_native(field: Any, lora: LoraStack | None) -> Any:
    """Return a layer's field, with its adapters if it has any, as the type that C++ expects."""
    if not isinstance(field, Projection):
        return field
    weight, bias = field
    outliers: list[Tensor] = []
    if isinstance(weight, PackedQuantizedWeight):
        packed, format = weight.records, ("group", *weight.format)
    elif isinstance(weight, PackedChannelWeight):
        packed, format = weight.panels, ("channel", weight.bits, False, 0)
    elif isinstance(weight, PackedTableWeight):
        packed, format, outliers = weight.panels, ("table", 4, False, 0), weight.outliers
    else:
        packed, format = weight.panels, ("floats", 0, False, 0)
    projection = torch.classes.quire.Projection(packed, weight.outputs, *format, outliers, bias)
    if lora:
        projection.set_lora(lora.a, lora.b, lora.ranks, lora.outputs)
    return projection
