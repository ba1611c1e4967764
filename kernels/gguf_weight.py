"""`GGUFWeight`: a weight in blocks of GGUF's types, as its file has them.

A kernel packs the blocks straight from the mapped file, in groups of 32 inputs: csrc/gguf_types.h says how, and how
exactly. The `gguf` package says what their values are, for those who want floats.
"""

from collections.abc import Sequence
from typing import NamedTuple

import gguf.quants
import torch
from gguf.constants import GGMLQuantizationType
from torch import Tensor

_NAMES = ("Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q8_0", "Q2_K", "Q3_K", "Q4_K", "Q5_K", "Q6_K", "IQ4_NL", "IQ4_XS")
PACKED_TYPES = frozenset(GGMLQuantizationType[name] for name in _NAMES)
"""The types that a weight may have: those in csrc/gguf_types.h."""


class GGUFPart(NamedTuple):
    """Some of a weight's outputs, in blocks of one type."""

    type: GGMLQuantizationType
    blocks: Tensor  # (out, n, bytes) uint8
    first: int  # the value of an output's first block that is its first input
    inputs: int

    def to(self, device: torch.device) -> "GGUFPart":
        """Return it with its blocks on `device`."""
        return self._replace(blocks=self.blocks.to(device))

    def dequantize(self) -> Tensor:
        """Return the weight (out, in) in float32."""
        values = gguf.quants.dequantize(self.blocks.flatten(1).cpu().numpy(), self.type)
        return torch.from_numpy(values)[:, self.first : self.first + self.inputs].to(self.blocks.device)


class GGUFWeight(NamedTuple):
    """A weight (out, in); `in` is a multiple of 32. The outputs of its parts follow one another."""

    parts: Sequence[GGUFPart]

    @property
    def shape(self) -> tuple[int, int]:
        """The outputs of all parts, and the inputs."""
        return sum(len(part.blocks) for part in self.parts), self.parts[0].inputs

    def to(self, device: torch.device) -> "GGUFWeight":
        """Return the weight with its blocks on `device`."""
        return GGUFWeight([part.to(device) for part in self.parts])

    def dequantize(self) -> Tensor:
        """Return the weight (out, in) in float32."""
        return torch.cat([part.dequantize() for part in self.parts])
