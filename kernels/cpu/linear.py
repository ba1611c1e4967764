"""Matmuls with packed weights, of floats or quantised, and lookups of their rows: csrc/*linear.cpp."""

from collections.abc import Iterator, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from kernels.gguf_weight import GGUFPart, GGUFWeight
from kernels.quantized import (
    QUANT_GROUP_SIZE,
    FloatWeight,
    RoundedWeight,
    Rows,
    StoredRows,
    Weight,
    restore_input_order,
    row_blocks,
)
from kernels.table_weight import TableWeight

PANEL = 32  # outputs of a panel
_NARROW = (torch.bfloat16, torch.float16)
_COMPARED_ROWS = 256  # at once
_NO_BLOCKS = -1  # instead of the type of blocks: a tensor of floats


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


class PackedChannelWeight(NamedTuple):
    """A weight that was rounded when it was packed. The GEMM rounds activations to 8 bits."""

    panels: Tensor  # (panel, bytes)
    outputs: int
    inputs: int
    bits: int


class PackedTableWeight(NamedTuple):
    """A weight with a table for each output, rounded to 13 bits. The GEMM rounds activations to 8 bits."""

    panels: Tensor  # (panel, bytes)
    outputs: int
    inputs: int
    outliers: list[Tensor]  # the fields of `Outliers`; empty: there are none


class ReorderedWeight(NamedTuple):
    """A quantised weight whose inputs were permuted before they were grouped. `linear` permutes `x` in the same way."""

    weight: PackedQuantizedWeight
    order: Tensor  # (in,) int64


Packed = PackedWeight | PackedQuantizedWeight | PackedChannelWeight | PackedTableWeight | ReorderedWeight


def pack_linear(weight: Weight) -> Packed:
    """Return `weight` (out, in) in panels, rounded if it is to be, and float32 in 16 bits where these hold it all."""
    if isinstance(weight, Tensor):
        weight = FloatWeight(_narrowest_dtype(weight), [weight])
    if isinstance(weight, FloatWeight):
        panels = torch.ops.quire.float_panels(*weight.shape, _panel_dtype(weight))
        for operands, target in _blocks(weight.parts, panels):
            torch.ops.quire.pack_linear(*operands, target)
        return PackedWeight(panels, weight.shape[0])
    if isinstance(weight, RoundedWeight):
        panels = torch.ops.quire.channel_panels(*weight.shape, weight.bits)
        for operands, target in _blocks(weight.parts, panels):
            torch.ops.quire.round_and_pack(*operands, weight.shape[1], weight.bits, target)
        return PackedChannelWeight(panels, *weight.shape, weight.bits)
    if isinstance(weight, TableWeight):
        codes, tables = [part.codes for part in weight.parts], [part.tables for part in weight.parts]
        return PackedTableWeight(torch.ops.quire.pack_tables(codes, tables), *weight.shape, list(weight.outliers or ()))
    if isinstance(weight, GGUFWeight):
        records, *format = torch.ops.quire.pack_blocks(*_operands(weight.parts), weight.shape[1])
        return PackedQuantizedWeight(records, weight.shape[0], tuple(format))
    parts = weight.parts
    quants, scales = [part.quants for part in parts], [part.scales for part in parts]
    mins = [part.mins for part in parts if part.mins is not None]
    bits, _, _, _, zero_point, order, layout, group_size = parts[0]
    inputs = parts[0].shape[1]
    records = torch.ops.quire.pack_quantized(quants, scales, mins, layout, bits, inputs, group_size, order)
    packed = PackedQuantizedWeight(records, sum(map(len, scales)), (bits, bool(mins), zero_point))
    return packed if order is None else ReorderedWeight(packed, order)


class _Operands(NamedTuple):
    """The parts of a weight as kernels take them: csrc/float_parts.h."""

    tensors: list[Tensor]
    types: list[int]
    first_groups: list[int]


def _blocks(parts: Sequence[Rows], panels: Tensor) -> Iterator[tuple[_Operands, Tensor]]:
    """Yield the rows of all parts in blocks, each with the panels for it: all at once if kernels can read them where
    they lie.
    """
    stored = [_stored(part) for part in parts]
    if all(stored):
        yield _operands([own for part in stored for own in part]), panels
        return
    for first, rows in row_blocks(parts):
        end = first + sum(map(len, rows))
        yield _operands(rows), panels[first // PANEL : -(-end // PANEL)]


def _narrowest_dtype(weight: Tensor) -> torch.dtype:
    """Return 16 bits instead of float32 if they hold all numbers of a weight, as when it was widened from them."""
    for narrow in _NARROW:
        # Most that do not fit show that in the first block, and no copy of the whole is made.
        blocks = torch.split(weight, _COMPARED_ROWS) if weight.dtype == torch.float32 else ()
        if blocks and all(torch.equal(block.to(narrow).float(), block) for block in blocks):
            return narrow
    return weight.dtype


def _panel_dtype(weight: FloatWeight) -> torch.dtype:
    """Return 16 bits instead of float32 if all parts are stored so: half the memory to read, and the same results."""
    stored = {part.dtype if isinstance(part, Tensor) else None for part in weight.parts}
    for narrow in _NARROW:
        if weight.dtype == torch.float32 and stored == {narrow}:
            return narrow
    return weight.dtype


def _stored(part: Rows) -> Sequence[Tensor | GGUFPart]:
    """Return `part` as it lies in memory or in a file; nothing if its rows are yet to be computed."""
    if isinstance(part, StoredRows):
        return part.parts
    return [part] if isinstance(part, Tensor) else []


def _operands(parts: Sequence[Tensor | GGUFPart]) -> _Operands:
    tensors, types, first_groups = zip(*map(_operand, parts), strict=True)
    return _Operands(list(tensors), list(types), list(first_groups))


def _operand(part: Tensor | GGUFPart) -> tuple[Tensor, int, int]:
    if isinstance(part, GGUFPart):
        return part.blocks, int(part.type), part.first // QUANT_GROUP_SIZE
    return part.float() if part.dtype == torch.float64 else part, _NO_BLOCKS, 0


def linear(x: Tensor, weight: Packed, bias: Tensor | None = None) -> Tensor:
    """y = x Wᵀ + b, in float32; fastest where `x` is float32."""
    if isinstance(weight, ReorderedWeight):
        return linear(x.index_select(1, weight.order), weight.weight, bias)
    wide = x.float()
    y = wide.new_empty(len(wide), weight.outputs)
    wide_bias = None if bias is None else bias.float()
    if isinstance(weight, PackedQuantizedWeight):
        torch.ops.quire.quantized_linear(wide, weight.records, *weight.format, wide_bias, y)
    elif isinstance(weight, PackedChannelWeight):
        torch.ops.quire.channel_linear(wide, weight.panels, weight.bits, wide_bias, y)
    elif isinstance(weight, PackedTableWeight):
        torch.ops.quire.table_linear(wide, weight.panels, weight.outliers, wide_bias, y)
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
    elif isinstance(table, PackedChannelWeight):
        torch.ops.quire.channel_rows(table.panels, table.bits, ids.long(), y)
    elif isinstance(table, PackedTableWeight):
        torch.ops.quire.table_rows(table.panels, table.outliers, ids.long(), y)
    else:
        torch.ops.quire.packed_rows(table.panels, ids.long(), y)
    return y
