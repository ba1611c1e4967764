"""`TableWeight`: a weight whose 4 bits are looked up in a table for each output, with outliers beside it (SqueezeLLM).

    weight[n, k] = table[n, code[n, k]] + outlier[n, k]

The codes stay packed as checkpoints have them, so that a kernel packs them straight from a mapped file. Most weights
have no outliers, and those that have some have them for a few inputs of each output.
"""

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

TABLE_SIZE = 16
CODES_PER_WORD = 8
"""Codes in an int32, the lowest bits first."""

_OUTPUTS_AT_ONCE = 512  # of which codes are unpacked together


def words_of(inputs: slice) -> slice:
    """Return the words that have the codes of some inputs, which are whole words of them."""
    return slice(inputs.start // CODES_PER_WORD, inputs.stop // CODES_PER_WORD)


class Outliers(NamedTuple):
    """A sparse matrix (out, in) in compressed rows: output n has the entries from offsets[n] to offsets[n + 1]."""

    offsets: Tensor  # (out + 1,) int64
    inputs: Tensor  # of each entry, int32
    values: Tensor  # of each entry, float32

    def to(self, device: torch.device) -> "Outliers":
        """Return them with their tensors on `device`."""
        return Outliers(*(tensor.to(device) for tensor in self))

    def add_to(self, weight: Tensor) -> None:
        """Add them to a weight (out, in) in float32. Entries of the same place add up."""
        outputs = torch.arange(len(weight), device=weight.device)
        outputs = outputs.repeat_interleave(self.offsets.diff(), output_size=len(self.values))
        weight.index_put_((outputs, self.inputs.long()), self.values, accumulate=True)

    def region(self, outputs: slice, inputs: slice) -> "Outliers":
        """Return those of some outputs and inputs, whose numbers begin with 0 then."""
        first, end = int(self.offsets[outputs.start]), int(self.offsets[outputs.stop])
        columns = self.inputs[first:end]
        own = (columns >= inputs.start) & (columns < inputs.stop)
        counted = torch.cat((torch.zeros(1).long(), own.cumsum(0)))  # those before each entry
        offsets = counted[self.offsets[outputs.start : outputs.stop + 1] - first]
        return Outliers(offsets, columns[own] - inputs.start, self.values[first:end][own])


class TablePart(NamedTuple):
    """Some of a weight's outputs."""

    codes: Tensor  # (in / 8, out) int32: each has those of neighbouring inputs
    tables: Tensor  # (out, TABLE_SIZE) of floats
    outliers: Outliers | None = None

    def to(self, device: torch.device) -> "TablePart":
        """Return them with their tensors on `device`."""
        outliers = self.outliers and self.outliers.to(device)
        return TablePart(self.codes.to(device), self.tables.to(device), outliers)

    def region(self, outputs: slice, inputs: slice) -> "TablePart":
        """Return those of some outputs and inputs, which are whole words of codes."""
        words = words_of(inputs)
        outliers = self.outliers and self.outliers.region(outputs, inputs)
        return TablePart(self.codes[words, outputs].contiguous(), self.tables[outputs].contiguous(), outliers)

    def dequantize(self) -> Tensor:
        """Return the weight (out, in) in float32."""
        groups, outputs = self.codes.shape
        weight = torch.empty(outputs, groups * CODES_PER_WORD, device=self.codes.device)
        shifts = torch.arange(0, 4 * CODES_PER_WORD, 4, device=self.codes.device)
        for first in range(0, outputs, _OUTPUTS_AT_ONCE):
            block = slice(first, first + _OUTPUTS_AT_ONCE)
            codes = (self.codes[:, block].T[..., None] >> shifts & TABLE_SIZE - 1).flatten(1)
            torch.gather(self.tables[block].float(), 1, codes.long(), out=weight[block])
        if self.outliers:
            self.outliers.add_to(weight)
        return weight


class TableWeight(NamedTuple):
    """A weight (out, in); `in` is a multiple of 32. The outputs of its parts follow one another."""

    parts: Sequence[TablePart]

    @property
    def shape(self) -> tuple[int, int]:
        """The outputs of all parts, and the inputs."""
        return sum(len(part.tables) for part in self.parts), len(self.parts[0].codes) * CODES_PER_WORD

    @property
    def outliers(self) -> Outliers | None:
        """The outliers of all parts; None if no part has any."""
        if not any(part.outliers for part in self.parts):
            return None
        none = torch.empty(0, dtype=torch.int32), torch.empty(0)
        parts = [part.outliers or Outliers(torch.zeros(len(part.tables) + 1).long(), *none) for part in self.parts]
        counts = torch.cat([part.offsets.diff() for part in parts])
        return Outliers(
            torch.cat((torch.zeros(1).long(), counts.cumsum(0))),
            torch.cat([part.inputs for part in parts]),
            torch.cat([part.values for part in parts]),
        )

    def to(self, device: torch.device) -> "TableWeight":
        """Return the weight with its tensors on `device`."""
        return TableWeight([part.to(device) for part in self.parts])

    def dequantize(self) -> Tensor:
        """Return the weight (out, in) in float32."""
        return torch.cat([part.dequantize() for part in self.parts])
