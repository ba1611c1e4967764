"""Adapters (LoRA) of a linear operation, in two halves: shrink to the rank, and expand to the outputs.

A stack holds A as (S, P R, in), the parts one below the other, and B as (S, out, R).
"""

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from kernels.lora import LoraPart, LoraSegments, LoraStack, LoraWeights, joined


def new_lora(
    slots: int, rank: int, inputs: int, outputs: tuple[int, ...], dtype: torch.dtype, device: torch.device
) -> LoraStack:
    """Return slots without adapters."""
    a = torch.zeros(slots, len(outputs) * rank, inputs, dtype=dtype, device=device)
    b = torch.zeros(slots, sum(outputs), rank, dtype=dtype, device=device)
    ranks = torch.zeros(slots, len(outputs), dtype=torch.int32, device=device)
    return LoraStack(a, b, ranks, outputs, inputs, rank)


def pack_lora(parts: Sequence[LoraPart | None], stack: LoraStack) -> LoraWeights:
    """Return the weights in the stack's type, in pinned memory if the stack is on a GPU."""
    a, b, ranks = joined(parts, stack)
    weights = LoraWeights(a.to(stack.a.dtype), b.to(stack.b.dtype), ranks)
    return LoraWeights(*(tensor.pin_memory() for tensor in weights)) if stack.a.is_cuda else weights


def lora_shrink(x: Tensor, stack: LoraStack, segments: LoraSegments) -> Tensor:
    """h[t] = A[s] x[t], (T, P R) float32."""
    shrunk = x.new_zeros(len(x), stack.a.shape[1], dtype=torch.float32)
    for slot, tokens in _segments(segments):
        shrunk[tokens] = x[tokens].float() @ stack.a[slot].float().T
    return shrunk


def lora_expand(y: Tensor, shrunk: Tensor, stack: LoraStack, segments: LoraSegments) -> None:
    """y[t, outputs of part p] += B[s, outputs of part p] h[t, p R : (p + 1) R]."""
    for slot, tokens in _segments(segments):
        parts, bs = torch.split(shrunk[tokens], stack.rank, 1), torch.split(stack.b[slot], list(stack.outputs))
        delta = torch.cat([part @ b.float().T for part, b in zip(parts, bs, strict=True)], 1)
        y[tokens] = (y[tokens].float() + delta).to(y.dtype)


def _segments(segments: LoraSegments) -> Iterator[tuple[int, slice]]:
    offsets = segments.offsets.tolist()
    for slot, first, end in zip(segments.slots.tolist(), offsets[:-1], offsets[1:], strict=True):
        yield slot, slice(first, end)
