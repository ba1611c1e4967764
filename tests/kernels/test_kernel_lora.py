"""Adapters against float64 loops, and their bits in other batches, stacks and numbers of threads."""

import itertools
from collections.abc import Iterator, Sequence

import pytest
import torch
from torch import Tensor

from kernels.cpu import extension
from kernels.load import ops, reference
from kernels.lora import LoraPart, LoraSegments, LoraStack, padded_rank
from kernels.ops import Ops
from tests.kernels.tolerance import assert_near

OPS = ops(torch.device("cpu"))
CPU = torch.device("cpu")
INPUTS, OUTPUTS = 300, (67, 33, 8)
RANKS = [(16, 5, 1), (3, 0, 16), (0, 0, 0), (9, 16, 7)]  # of each adapter's parts; 0: it leaves the part alone
SLOTS, OFFSETS = [2, 0, 3, 1], [5, 6, 40, 41, 57]
compiled_only = pytest.mark.skipif(not extension.load(), reason="only the compiled kernels are batch-invariant")


@pytest.fixture(autouse=True)
def _threads() -> Iterator[None]:
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)


def adapters() -> list[list[LoraPart | None]]:
    generator = torch.Generator().manual_seed(0)
    return [
        [
            (torch.randn(rank, INPUTS, generator=generator), torch.randn(width, rank, generator=generator))
            if rank
            else None
            for rank, width in zip(ranks, OUTPUTS, strict=True)
        ]
        for ranks in RANKS
    ]


def filled_stack(implementation: Ops, dtype: torch.dtype = torch.float32, rank: int = 16) -> LoraStack:
    stack = implementation.new_lora(len(RANKS), rank, INPUTS, OUTPUTS, dtype, CPU)
    for slot, parts in enumerate(adapters()):
        stack.put(slot, implementation.pack_lora(parts, stack))
    return stack


def segments_of(slots: Sequence[int], offsets: Sequence[int]) -> LoraSegments:
    longest = max(end - first for first, end in itertools.pairwise(offsets))
    return LoraSegments(torch.tensor(slots), torch.tensor(offsets), longest)


def apply(implementation: Ops, x: Tensor, y: Tensor, stack: LoraStack, segments: LoraSegments) -> Tensor:
    y = y.clone()
    implementation.lora_expand(y, implementation.lora_shrink(x, stack, segments), stack, segments)
    return y


def batch() -> tuple[Tensor, Tensor]:
    """Return 60 tokens, a view that is not contiguous, and what an operation made of them."""
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(60, INPUTS + 3, generator=generator)[:, 1:-2] / INPUTS**0.5
    return x, torch.randn(60, sum(OUTPUTS), generator=generator)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("implementation", [OPS, reference()], ids=["cpu", "reference"])
def test_shrink_and_expand(implementation: Ops, dtype: torch.dtype) -> None:
    (x, y), by_slot = batch(), adapters()
    expected = y.double()
    for slot, (first, end) in zip(SLOTS, itertools.pairwise(OFFSETS), strict=True):
        for part, outputs in zip(by_slot[slot], expected[first:end].split(OUTPUTS, 1), strict=True):
            if part is not None:
                a, b = (matrix.to(dtype).double() for matrix in part)
                outputs += x[first:end].double() @ a.T @ b.T
    ours = apply(implementation, x, y, filled_stack(implementation, dtype), segments_of(SLOTS, OFFSETS))
    assert_near(ours, expected, torch.float32, 16)
    assert torch.equal(ours[:6], y[:6])  # without an adapter, or with one that leaves the operation alone
    assert torch.equal(ours[57:], y[57:])
    assert (ours[6:57] != y[6:57]).any(1).all()


@compiled_only
def test_a_row_depends_on_itself_alone() -> None:
    (x, y), stack = batch(), filled_stack(OPS)
    torch.set_num_threads(1)
    whole = apply(OPS, x, y, stack, segments_of(SLOTS, OFFSETS))
    for threads in (1, 2, 3):
        torch.set_num_threads(threads)
        assert torch.equal(apply(OPS, x, y, stack, segments_of(SLOTS, OFFSETS)), whole)
        for first, end in ((6, 7), (6, 40), (9, 12), (20, 39)):
            alone = apply(OPS, x[first:end], y[first:end], stack, segments_of([0], [0, end - first]))
            assert torch.equal(alone, whole[first:end])
    for rank in (32, 64):  # of the stack, which adapters of larger ranks may demand
        assert torch.equal(apply(OPS, x, y, filled_stack(OPS, rank=rank), segments_of(SLOTS, OFFSETS)), whole)


@pytest.mark.parametrize("implementation", [OPS, reference()], ids=["cpu", "reference"])
def test_a_slot_holds_the_last_adapter_alone(implementation: Ops) -> None:
    (x, y), stack = batch(), filled_stack(implementation)
    expected = apply(implementation, x, y, stack, segments_of([1], [0, 60]))
    stack.put(0, implementation.pack_lora(adapters()[1], stack))
    assert torch.equal(apply(implementation, x, y, stack, segments_of([0], [0, 60])), expected)
    stack.put(0, None)
    assert torch.equal(apply(implementation, x, y, stack, segments_of([0], [0, 60])), y)


@compiled_only
def test_a_slot_that_is_not_there_is_refused() -> None:
    (x, _), stack = batch(), filled_stack(OPS)
    with pytest.raises(RuntimeError, match="no adapter slot 4"):
        OPS.lora_shrink(x, stack, segments_of([4], [0, 60]))


def test_padded_ranks() -> None:
    assert [padded_rank(rank) for rank in (1, 8, 9, 16, 17, 64, 65, 512)] == [8, 8, 16, 16, 32, 64, 128, 512]
