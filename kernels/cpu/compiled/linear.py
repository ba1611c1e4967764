"""y = x Wᵀ + b with packed weights, of floats or of few bits; and the rows of such weights."""

from typing import NamedTuple

import torch
from torch import Tensor

from kernels.quantized import GROUP, QuantizedWeight, in_own_order


class PackedLinear(NamedTuple):
    """A weight (out, in) in panels of 32 outputs; the last one is filled up with zeros."""

    panels: Tensor  # (panel, in, 32)
    outputs: int


class PackedQuantized(NamedTuple):
    """A weight of few bits in the order in which its product reads it. Activations are rounded to 8 bits for it."""

    records: Tensor  # (panel, group, bytes)
    outputs: int
    kind: tuple[int, bool, int]  # bits, whether there are leasts, zero


class PackedReordered(NamedTuple):
    """A weight of few bits whose groups are of scattered inputs: these are put side by side first."""

    weight: PackedQuantized
    order: Tensor  # (in,) int64


Packed = PackedLinear | PackedQuantized | PackedReordered


def pack_linear(weight: Tensor | QuantizedWeight) -> Packed:
    """`weight` (out, in) laid out anew, in its own dtype."""
    if not isinstance(weight, QuantizedWeight):
        return PackedLinear(torch.ops.quire.pack_linear(weight), len(weight))
    bits, codes, steps, leasts, zero, order = weight
    records = torch.ops.quire.pack_quantized(codes.contiguous(), steps.contiguous(), leasts, bits)
    packed = PackedQuantized(records, len(codes), (bits, leasts is not None, zero))
    return packed if order is None else PackedReordered(packed, order)


def linear(x: Tensor, weight: Packed, bias: Tensor | None = None) -> Tensor:
    """As the reference, computed in float32 and fastest where `x` is."""
    if isinstance(weight, PackedReordered):
        return linear(x.index_select(1, weight.order), weight.weight, bias)
    wide = x.float()
    y = wide.new_empty(len(wide), weight.outputs)
    wide_bias = None if bias is None else bias.float()
    if isinstance(weight, PackedQuantized):
        torch.ops.quire.quantized_linear(wide, weight.records, *weight.kind, wide_bias, y)
    else:
        torch.ops.quire.linear(wide, weight.panels, wide_bias, y)
    return y.to(x.dtype)


def embedding(ids: Tensor, table: Tensor | Packed) -> Tensor:
    """As the reference, in float32. A packed weight serves as a table too: its rows are the outputs."""
    if isinstance(table, Tensor):
        return table.index_select(0, ids).float()
    if isinstance(table, PackedReordered):
        return in_own_order(embedding(ids, table.weight), table.order)
    if isinstance(table, PackedQuantized):
        y = torch.empty(len(ids), table.records.shape[1] * GROUP)
        torch.ops.quire.quantized_rows(table.records, *table.kind, ids.long(), y)
        return y
    y = torch.empty(len(ids), table.panels.shape[1])
    torch.ops.quire.packed_rows(table.panels, ids.long(), y)
    return y
