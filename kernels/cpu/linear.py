"""Matmuls with packed weights, of floats or quantised, and lookups of their rows: csrc/*linear.cpp."""

from typing import NamedTuple

import torch
from torch import Tensor

from kernels.quantized import (
    QUANT_GROUP_SIZE,
    FloatWeight,
    RoundedWeight,
    Weight,
    quantize,
    restore_input_order,
    stack,
)


class PackedWeight(NamedTuple):
    """A weight (out, in) of floats in panels of 32 outputs. The last panel is padded with zeros."""

    panels: Tensor  # (panel, in, 32)
    outputs: int

    @property
    def inputs(self) -> int:
        return self.panels.shape[1]


class PackedQuantizedWeight(NamedTuple):
    """A quantised weight in the order in which its GEMM reads it. The GEMM rounds activations to 8 bits."""

    records: Tensor  # (panel, group, bytes)
    outputs: int
    format: tuple[int, bool, int]  # bits, whether there are mins, zero point

    @property
    def inputs(self) -> int:
        return self.records.shape[1] * QUANT_GROUP_SIZE


class ReorderedWeight(NamedTuple):
    """A quantised weight whose inputs were permuted before they were grouped. `linear` permutes `x` in the same way."""

    weight: PackedQuantizedWeight
    order: Tensor  # (in,) int64


Packed = PackedWeight | PackedQuantizedWeight | ReorderedWeight


def pack_linear(weight: Weight) -> Packed:
    """Return `weight` (out, in) in panels."""
    if isinstance(weight, Tensor):
        weight = FloatWeight(weight.dtype, [weight])
    if isinstance(weight, FloatWeight):
        return PackedWeight(torch.ops.quire.pack_linear(weight.parts, weight.dtype), weight.shape[0])
    if isinstance(weight, RoundedWeight):
        parts = stack([quantize(part, weight.bits) for part in weight.parts])
        assert parts  # inputs of parts that were rounded are in one order
        return pack_linear(parts)
    bits, quants, scales, mins, zero_point, order = weight
    records = torch.ops.quire.pack_quantized(quants.contiguous(), scales.contiguous(), mins, bits)
    packed = PackedQuantizedWeight(records, len(quants), (bits, mins is not None, zero_point))
    return packed if order is None else ReorderedWeight(packed, order)


def linear(x: Tensor, weight: Packed, bias: Tensor | None = None) -> Tensor:
    """y = x Wᵀ + b, in float32; fastest where `x` is float32."""
    if isinstance(weight, ReorderedWeight):
        return linear(x.index_select(1, weight.order), weight.weight, bias)
    wide = x.float()
    y = wide.new_empty(len(wide), weight.outputs)
    wide_bias = None if bias is None else bias.float()
    if isinstance(weight, PackedQuantizedWeight):
        torch.ops.quire.quantized_linear(wide, weight.records, *weight.format, wide_bias, y)
    else:
        torch.ops.quire.linear(wide, weight.panels, wide_bias, y)
    return y.to(x.dtype)


def logits(x: Tensor, weight: Packed) -> Tensor:
    """y = x Wᵀ in float32."""
    return linear(x, weight).float()


def embedding(ids: Tensor, table: Tensor | Packed) -> Tensor:
    """Return the table's rows in float32."""
    if isinstance(table, Tensor):
        return table.index_select(0, ids).float()
    if isinstance(table, ReorderedWeight):
        return restore_input_order(embedding(ids, table.weight), table.order)
    y = torch.empty(len(ids), table.inputs)
    if isinstance(table, PackedQuantizedWeight):
        torch.ops.quire.quantized_rows(table.records, *table.format, ids.long(), y)
    else:
        torch.ops.quire.packed_rows(table.panels, ids.long(), y)
    return y
