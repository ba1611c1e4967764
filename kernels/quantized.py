"""Weights as checkpoints have them, which `pack_linear` takes: floats, floats to be rounded, and quants.

A `QuantizedWeight` has quants of 4 or 8 bits:

    weight[n, k] = scale[n, g] * quant[n, k] + min[n, g]          g = k // 32

Without mins, all quants of a weight have one zero point: min = -zero_point * scale. GGUF's Q4_0, Q4_1 and Q8_0 are of
this form. `RoundedWeight` is one of floats that Quire rounds to 8 or 4 bits. table_weight.py has those with tables.
"""

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from kernels.table_weight import TableWeight

QUANT_GROUP_SIZE = 32
"""Inputs that share a scale."""

_ZERO_POINT = 128  # of 8 bits that were 4


class QuantizedWeight(NamedTuple):
    """A weight (out, in) of 4 or 8 bits; `in` is a multiple of the group size.

    With `order`, the inputs were permuted before they were grouped: column i belongs to input order[i].
    """

    bits: int
    quants: Tensor  # (out, in) uint8, below 2 ** bits
    scales: Tensor  # (out, in / 32) float16
    mins: Tensor | None  # (out, in / 32) float16
    zero_point: int = 0  # where there are no mins
    order: Tensor | None = None  # (in,) int64

    def to(self, device: torch.device) -> "QuantizedWeight":
        """Return the weight with its tensors on `device`."""
        mins = None if self.mins is None else self.mins.to(device)
        order = None if self.order is None else self.order.to(device)
        return self._replace(quants=self.quants.to(device), scales=self.scales.to(device), mins=mins, order=order)

    def dequantize(self) -> Tensor:
        """Return the weight (out, in) in float32, with inputs in their original order."""
        quants = self.quants.view(*self.scales.shape, QUANT_GROUP_SIZE).float()
        if self.mins is None:
            weight = (quants - self.zero_point) * self.scales.float()[..., None]
        else:
            weight = torch.addcmul(self.mins.float()[..., None], quants, self.scales.float()[..., None])
        return restore_input_order(weight.view(self.quants.shape), self.order)


class FloatWeight(NamedTuple):
    """A weight of floats that `pack_linear` converts to `dtype`. Its parts may be memory maps of files."""

    dtype: torch.dtype
    parts: Sequence[Tensor]  # (out, in) of floats each, whose outputs follow one another

    @property
    def shape(self) -> tuple[int, int]:
        """The outputs of all parts, and the inputs."""
        return _joined_shape(self.parts)

    def joined(self) -> Tensor:
        """Return a copy of the weight (out, in)."""
        joined = torch.empty(self.shape, dtype=self.dtype, device=self.parts[0].device)
        for target, part in zip(torch.split(joined, [len(part) for part in self.parts]), self.parts, strict=True):
            target.copy_(part)
        return joined


class RoundedWeight(NamedTuple):
    """A weight of floats that `pack_linear` rounds: to 8 bits with a scale for each output, or to 4 bits.

    `in` is a multiple of QUANT_GROUP_SIZE. With 4 bits, each output is rounded to 8 bits, and each group of its inputs
    again, with a whole scale and a whole min (QServe: Lin et al., 2024). Parts may be memory maps of files.
    """

    bits: int
    parts: Sequence[Tensor]  # (out, in) of floats each, whose outputs follow one another

    @property
    def shape(self) -> tuple[int, int]:
        """The outputs of all parts, and the inputs."""
        return _joined_shape(self.parts)


def _joined_shape(parts: Sequence[Tensor]) -> tuple[int, int]:
    return sum(len(part) for part in parts), parts[0].shape[1]


def restore_input_order(columns: Tensor, order: Tensor | None) -> Tensor:
    """Return `columns` (rows, in) in the inputs' original order. Column i belongs to input order[i]."""
    if order is None:
        return columns
    result = torch.empty_like(columns)
    result[:, order] = columns
    return result


def stack(parts: Sequence[QuantizedWeight]) -> QuantizedWeight | None:
    """Return one weight with the outputs of all `parts`; None if their inputs are in different orders.

    Parts of different formats are converted to the more general one: 8 bits, and mins. Both conversions are exact,
    except for mins of a zero point that is not a power of two, which are rounded to float16.
    """
    if len(parts) == 1:
        return parts[0]
    if not all(_equal(part.order, parts[0].order) for part in parts):
        return None
    if len({part.bits for part in parts}) > 1:
        parts = [_with_eight_bits(part) for part in parts]
    if len({(part.zero_point, part.mins is None) for part in parts}) > 1:
        parts = [_with_mins(part) for part in parts]
    mins = [part.mins for part in parts if part.mins is not None]
    return parts[0]._replace(
        quants=torch.cat([part.quants for part in parts]),
        scales=torch.cat([part.scales for part in parts]),
        mins=torch.cat(mins) if mins else None,
    )


def _equal(a: Tensor | None, b: Tensor | None) -> bool:
    return a is b or (a is not None and b is not None and torch.equal(a, b))


def _with_eight_bits(weight: QuantizedWeight) -> QuantizedWeight:
    if weight.bits == 8 or weight.mins is not None:
        return weight._replace(bits=8)
    quants = weight.quants + (_ZERO_POINT - weight.zero_point)
    return weight._replace(bits=8, quants=quants, zero_point=_ZERO_POINT)


def _with_mins(weight: QuantizedWeight) -> QuantizedWeight:
    if weight.mins is not None:
        return weight
    return weight._replace(mins=weight.scales * -weight.zero_point, zero_point=0)


Weight = Tensor | FloatWeight | RoundedWeight | QuantizedWeight | TableWeight
"""What `pack_linear` takes, (out, in)."""
