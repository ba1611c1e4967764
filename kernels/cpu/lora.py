"""Adapters (LoRA) of a linear operation: csrc/lora.cpp, which computes in float32 whatever the type of the adapters.

A stack holds A as (S, panel, in, 16), where a panel has 16 outputs, and B as (S, panel, R, 32). The last panels are
padded with zeros.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from kernels.lora import LoraPart, LoraSegments, LoraStack, LoraWeights, joined

A_PANEL, B_PANEL = 16, 32


def new_lora(
    slots: int, rank: int, inputs: int, outputs: tuple[int, ...], dtype: torch.dtype, device: torch.device
) -> LoraStack:
    """Return slots without adapters."""
    a = torch.zeros(slots, -(-len(outputs) * rank // A_PANEL), inputs, A_PANEL, dtype=dtype, device=device)
    b = torch.zeros(slots, -(-sum(outputs) // B_PANEL), rank, B_PANEL, dtype=dtype, device=device)
    ranks = torch.zeros(slots, len(outputs), dtype=torch.int32, device=device)
    return LoraStack(a, b, ranks, outputs, inputs, rank)


def pack_lora(parts: Sequence[LoraPart | None], stack: LoraStack) -> LoraWeights:
    """Return the weights in panels, in the stack's type."""
    a, b, ranks = joined(parts, stack)
    return LoraWeights(_panels(a, A_PANEL).to(stack.a.dtype), _panels(b, B_PANEL).to(stack.b.dtype), ranks)


def lora_shrink(x: Tensor, stack: LoraStack, segments: LoraSegments) -> Tensor:
    """Return the products (T, ...) with A, for `lora_expand`."""
    shrunk = torch.empty(len(x), stack.a.shape[1] * A_PANEL)
    torch.ops.quire.lora_shrink(x.float(), *stack[:4], *segments[:2], shrunk)
    return shrunk


def lora_expand(y: Tensor, shrunk: Tensor, stack: LoraStack, segments: LoraSegments) -> None:
    """Add the products with B to y (T, out) of float32."""
    torch.ops.quire.lora_expand(shrunk, *stack[:4], *segments[:2], y)


def _panels(matrix: Tensor, size: int) -> Tensor:
    """Return a matrix (out, in) in panels (panel, in, size) of that many outputs."""
    padded = torch.nn.functional.pad(matrix, (0, 0, 0, -len(matrix) % size))
    return padded.view(-1, size, matrix.shape[1]).transpose(1, 2).contiguous()
