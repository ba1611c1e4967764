"""Weights as checkpoints have them, which `pack_linear` takes: floats, floats to be rounded, and quants.

A `QuantizedWeight` has quants of 4 or 8 bits:

    weight[n, k] = scale[n, g] * quant[n, k] + min[n, g]          g = k // group_size

Without mins, all quants of a weight have one zero point: min = -zero_point * scale. GPTQ and AWQ are of this form.
`RoundedWeight` is one of floats that Quire rounds to 8 or 4 bits. gguf_weight.py has those of blocks of GGUF's types,
table_weight.py those with tables.

Nothing is copied before it is packed: tensors may be memory maps of files, with quants as the files have them, and
floats that have to be computed from something else are `Rows`.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Literal, NamedTuple, Protocol

import torch
from torch import Tensor

from kernels.gguf_weight import GGUFPart, GGUFWeight
from kernels.table_weight import TableWeight

QUANT_GROUP_SIZE = 32
"""Inputs that share a scale in a packed weight; in checkpoints, a multiple of them may."""

Layout = Literal["rows", "gptq", "awq"]
"""Layouts of quants: (out, in) uint8, or as csrc/quantized_packing.cpp describes them."""

_AWQ_ORDER = (0, 2, 4, 6, 1, 3, 5, 7)
_BLOCK = 2**22  # elements of `Rows` that are computed at once


class Rows(Protocol):
    """A matrix (out, in) of floats, or a tensor. Its rows are made when they are asked for."""

    @property
    def shape(self) -> tuple[int, ...]: ...

    def __getitem__(self, rows: slice, /) -> Tensor: ...


@dataclass(frozen=True)
class StoredRows:
    """A matrix of floats that the CPU's kernels read where it is stored. Others ask for its rows."""

    parts: Sequence[Tensor | GGUFPart]  # whose outputs follow one another; blocks have whole groups of 32 inputs
    rows: Rows

    @property
    def shape(self) -> tuple[int, ...]:
        return self.rows.shape

    def __getitem__(self, rows: slice) -> Tensor:
        return self.rows[rows]


def row_blocks(parts: Sequence[Rows]) -> Iterator[tuple[int, list[Tensor]]]:
    """Yield the rows of all parts in blocks, each with the number of its first row, which is a multiple of 32.

    Tensors alone are one block, since nothing is computed; otherwise no more than a block is in memory at once.
    """
    ends = [0]
    for part in parts:
        ends.append(ends[-1] + part.shape[0])
    size = max(ends[-1], 1)
    if not all(isinstance(part, Tensor) for part in parts):
        size = max(_BLOCK // parts[0].shape[1] // 32 * 32, 32)
    for first in range(0, ends[-1], size):
        bounds = [(max(first - begin, 0), min(first + size, end) - begin) for begin, end in pairwise(ends)]
        yield first, [part[start:end] for part, (start, end) in zip(parts, bounds, strict=True) if start < end]


class QuantizedWeight(NamedTuple):
    """A weight (out, in) of 4 or 8 bits; `in` is a multiple of QUANT_GROUP_SIZE.

    With `order`, the inputs were permuted before they were grouped: place i belongs to input order[i]. In the layouts
    of GPTQ and AWQ, quants are in the order of the inputs nevertheless.
    """

    bits: int
    quants: Tensor  # as `layout` says
    scales: Tensor  # (out, in / group_size, rounded up) float16
    mins: Tensor | None  # like the scales
    zero_point: int = 0  # where there are no mins
    order: Tensor | None = None  # (in,) int64
    layout: Layout = "rows"
    group_size: int = QUANT_GROUP_SIZE  # a multiple of QUANT_GROUP_SIZE

    @property
    def shape(self) -> tuple[int, int]:
        """The outputs and the inputs."""
        match self.layout:
            case "rows":
                inputs = self.quants.shape[1]
            case "gptq":
                inputs = len(self.quants) * 32 // self.bits
            case "awq":
                inputs = len(self.quants)
        return len(self.scales), inputs

    @property
    def parts(self) -> Sequence["QuantizedWeight"]:
        """This weight alone, as a `StackedWeight` has several."""
        return [self]

    def to(self, device: torch.device) -> "QuantizedWeight":
        """Return the weight with its tensors on `device`."""
        mins = None if self.mins is None else self.mins.to(device)
        order = None if self.order is None else self.order.to(device)
        return self._replace(quants=self.quants.to(device), scales=self.scales.to(device), mins=mins, order=order)

    def unpacked(self) -> "QuantizedWeight":
        """Return a copy with quants in the layout `rows`, and in groups of QUANT_GROUP_SIZE."""
        if self.layout == "rows" and self.group_size == QUANT_GROUP_SIZE:
            return self
        quants = self._unpacked_quants()
        groups = torch.arange(0, quants.shape[1], QUANT_GROUP_SIZE, device=quants.device) // self.group_size
        mins = None if self.mins is None else self.mins[:, groups]
        return self._replace(
            quants=quants, scales=self.scales[:, groups], mins=mins, layout="rows", group_size=QUANT_GROUP_SIZE
        )

    def _unpacked_quants(self) -> Tensor:
        match self.layout:
            case "rows":
                return self.quants
            case "gptq":
                quants = unpack_words(self.quants.T.contiguous(), self.bits)
            case "awq":
                quants = unpack_awq(self.quants)
        return quants if self.order is None else quants[:, self.order]

    def dequantize(self) -> Tensor:
        """Return the weight (out, in) in float32, with inputs in their original order."""
        _, quants, scales, mins, zero_point, order, *_ = self.unpacked()
        grouped = quants.view(*scales.shape, QUANT_GROUP_SIZE).float()
        if mins is None:
            weight = (grouped - zero_point) * scales.float()[..., None]
        else:
            weight = torch.addcmul(mins.float()[..., None], grouped, scales.float()[..., None])
        return restore_input_order(weight.view(quants.shape), order)


class StackedWeight(NamedTuple):
    """Quantised weights of one format and layout, whose outputs follow one another."""

    parts: Sequence[QuantizedWeight]

    def to(self, device: torch.device) -> "StackedWeight":
        """Return the weight with its tensors on `device`."""
        return StackedWeight([part.to(device) for part in self.parts])

    def dequantize(self) -> Tensor:
        """Return the weight (out, in) in float32, with inputs in their original order."""
        return torch.cat([part.dequantize() for part in self.parts])


class FloatWeight(NamedTuple):
    """A weight of floats that `pack_linear` converts to `dtype`, or to a narrower type that changes no number."""

    dtype: torch.dtype
    parts: Sequence[Rows]  # (out, in) of floats each, whose outputs follow one another

    @property
    def shape(self) -> tuple[int, int]:
        """The outputs of all parts, and the inputs."""
        return _joined_shape(self.parts)

    def joined(self) -> Tensor:
        """Return a copy of the weight (out, in)."""
        joined = torch.empty(self.shape, dtype=self.dtype)
        for first, rows in row_blocks(self.parts):
            targets = torch.split(joined[first : first + sum(map(len, rows))], [len(part) for part in rows])
            for target, part in zip(targets, rows, strict=True):
                target.copy_(part)
        return joined


class RoundedWeight(NamedTuple):
    """A weight of floats that `pack_linear` rounds: to 8 bits with a scale for each output, or to 4 bits.

    `in` is a multiple of QUANT_GROUP_SIZE. With 4 bits, each output is rounded to 8 bits, and each group of its inputs
    again, with a whole scale and a whole min (QServe: Lin et al., 2024).
    """

    bits: int
    parts: Sequence[Rows]  # (out, in) of floats each, whose outputs follow one another

    @property
    def shape(self) -> tuple[int, int]:
        """The outputs of all parts, and the inputs."""
        return _joined_shape(self.parts)


def _joined_shape(parts: Sequence[Rows]) -> tuple[int, int]:
    return sum(part.shape[0] for part in parts), parts[0].shape[1]


def restore_input_order(columns: Tensor, order: Tensor | None) -> Tensor:
    """Return `columns` (rows, in) in the inputs' original order. Column i belongs to input order[i]."""
    if order is None:
        return columns
    result = torch.empty_like(columns)
    result[:, order] = columns
    return result


def stack(parts: Sequence[QuantizedWeight]) -> QuantizedWeight | StackedWeight | None:
    """Return one weight with the outputs of all `parts`, which have one layout and as many bits; None if their inputs
    are in different orders.

    If their zero points differ, or one has mins, all get mins. That is exact, except for mins of a zero point that is
    not a power of two, which are rounded to float16.
    """
    if len(parts) == 1:
        return parts[0]
    if not all(_equal(part.order, parts[0].order) for part in parts):
        return None
    if len({(part.zero_point, part.mins is None) for part in parts}) > 1:
        parts = [_with_mins(part) for part in parts]
    return StackedWeight(parts)


def _equal(a: Tensor | None, b: Tensor | None) -> bool:
    return a is b or (a is not None and b is not None and torch.equal(a, b))


def _with_mins(weight: QuantizedWeight) -> QuantizedWeight:
    if weight.mins is not None:
        return weight
    return weight._replace(mins=weight.scales * -weight.zero_point, zero_point=0)


def unpack_words(packed: Tensor, bits: int) -> Tensor:
    """Unpack int32 words `packed` (R, C), lowest bits first, to uint8 quants (R, C * 32 / bits)."""
    octets = packed.contiguous().view(torch.uint8)
    return octets if bits == 8 else torch.stack((octets & 15, octets >> 4), -1).flatten(1)


def unpack_awq(packed: Tensor) -> Tensor:
    """Unpack and transpose AWQ's int32 words `packed` (R, C) to uint8 quants (C * 8, R)."""
    words = packed.T.contiguous()
    quants = torch.empty(len(words), 8, words.shape[1], dtype=torch.uint8, device=words.device)
    for index, output in enumerate(_AWQ_ORDER):
        quants[:, output] = words >> 4 * index & 15
    return quants.flatten(0, 1)


Weight = Tensor | FloatWeight | RoundedWeight | QuantizedWeight | StackedWeight | GGUFWeight | TableWeight
"""What `pack_linear` takes, (out, in)."""
