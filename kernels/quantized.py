"""Weights of few bits, as values: what checkpoints hold, what rounding makes, and what products are packed from.

    weight[n, k] = step[n, g] * code[n, k] + least[n, g]          g = k // 32

Without leasts the codes lie around a zero that all of a weight share: least = -zero * step. These are GGUF's blocks
Q4_0, Q4_1 and Q8_0 as they are, and what `quantize` makes of a float weight.
"""

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

GROUP = 32  # inputs that share a step
_ZERO = 128  # of 8 bits around zero


class QuantizedWeight(NamedTuple):
    """A weight (out, in) of 4 or 8 bits; `in` is a multiple of the group.

    With an `order`, groups are of inputs that do not lie side by side: column i is that of input order[i].
    """

    bits: int
    codes: Tensor  # (out, in) uint8, below 2 ** bits
    steps: Tensor  # (out, in / 32) float16
    leasts: Tensor | None  # (out, in / 32) float16
    zero: int = 0  # where there are no leasts
    order: Tensor | None = None  # (in,) int64

    def dequantize(self) -> Tensor:
        """The numbers it stands for, float32, inputs in their own order."""
        codes = self.codes.view(*self.steps.shape, GROUP).float()
        if self.leasts is None:
            wide = (codes - self.zero) * self.steps.float()[..., None]
        else:
            wide = torch.addcmul(self.leasts.float()[..., None], codes, self.steps.float()[..., None])
        return in_own_order(wide.view(self.codes.shape), self.order)

    def rows(self, order: Tensor) -> "QuantizedWeight":
        """Its outputs in another order, or some of them."""
        leasts = None if self.leasts is None else self.leasts[order]
        return self._replace(codes=self.codes[order], steps=self.steps[order], leasts=leasts)


def in_own_order(columns: Tensor, order: Tensor | None) -> Tensor:
    """`columns` (rows, in), of which the one at i belongs to input order[i], in the order of the inputs."""
    if order is None:
        return columns
    own = torch.empty_like(columns)
    own[:, order] = columns
    return own


def stack(parts: Sequence[QuantizedWeight]) -> QuantizedWeight | None:
    """One weight of the outputs of all `parts`; None if their inputs are in different orders.

    Those of different kinds get the more general one: 8 bits, and leasts. Four bits among eight are exact. So are
    leasts, if a zero is a power of two; others are rounded to float16.
    """
    if not all(_same(part.order, parts[0].order) for part in parts):
        return None
    if len({part.bits for part in parts}) > 1:
        parts = [_with_eight_bits(part) for part in parts]
    if len({(part.zero, part.leasts is None) for part in parts}) > 1:
        parts = [_with_leasts(part) for part in parts]
    leasts = [part.leasts for part in parts if part.leasts is not None]
    return parts[0]._replace(
        codes=torch.cat([part.codes for part in parts]),
        steps=torch.cat([part.steps for part in parts]),
        leasts=torch.cat(leasts) if leasts else None,
    )


def _same(one: Tensor | None, other: Tensor | None) -> bool:
    return one is other or (one is not None and other is not None and torch.equal(one, other))


def _with_eight_bits(weight: QuantizedWeight) -> QuantizedWeight:
    if weight.bits == 8 or weight.leasts is not None:
        return weight._replace(bits=8)
    return weight._replace(bits=8, codes=weight.codes + (_ZERO - weight.zero), zero=_ZERO)


def _with_leasts(weight: QuantizedWeight) -> QuantizedWeight:
    if weight.leasts is not None:
        return weight
    return weight._replace(leasts=weight.steps * -weight.zero, zero=0)


def quantize(weight: Tensor, bits: int) -> QuantizedWeight:
    """`weight` (out, in) rounded to the nearest: 8 bits around zero, 4 bits from each group's least to its greatest."""
    groups = weight.float().view(len(weight), -1, GROUP)
    if bits == 8:
        steps = (groups.abs().amax(-1) / 127).half()
        codes = _codes(groups, steps, 0.0).clamp_(-127, 127) + _ZERO
        return QuantizedWeight(8, codes.to(torch.uint8).view(weight.shape), steps, None, _ZERO)
    leasts = groups.amin(-1).half()
    steps = ((groups.amax(-1) - leasts.float()) / 15).half()
    codes = _codes(groups, steps, leasts.float()[..., None]).clamp_(0, 15)
    return QuantizedWeight(4, codes.to(torch.uint8).view(weight.shape), steps, leasts)


def _codes(groups: Tensor, steps: Tensor, least: Tensor | float) -> Tensor:
    wide = steps.float()[..., None]
    return torch.where(wide > 0, (groups - least) / wide, 0.0).round_()
