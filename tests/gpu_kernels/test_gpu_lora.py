"""Adapters against the reference, in batches of several adapters and of rows without one."""

import itertools

import pytest
import torch

from kernels.gpu import ops as gpu
from kernels.lora import LoraSegments, LoraStack
from kernels.reference import ops as reference
from tests.kernels.tolerance import assert_near

INPUTS, OUTPUTS = 70, (67, 33, 8)
SLOTS, OFFSETS = [2, 0, 3], [5, 6, 23, 40]


def filled_stack(device: torch.device, rank: int, dtype: torch.dtype) -> LoraStack:
    """Return four slots of adapters of ranks up to `rank`, the third of which leaves the second part alone."""
    generator = torch.Generator().manual_seed(rank)
    stack = gpu.new_lora(4, rank, INPUTS, OUTPUTS, dtype, device)
    for slot in range(4):
        shapes = [((rank - slot, INPUTS), (width, rank - slot)) for width in OUTPUTS]
        parts = [(torch.randn(a, generator=generator), torch.randn(b, generator=generator)) for a, b in shapes]
        stack.put(slot, gpu.pack_lora([parts[0], None if slot == 2 else parts[1], parts[2]], stack))
    return stack


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
@pytest.mark.parametrize("rank", [8, 16, 128])
def test_shrink_and_expand(device: torch.device, rank: int, dtype: torch.dtype) -> None:
    stack = filled_stack(device, rank, dtype)
    segments = LoraSegments(torch.tensor(SLOTS, device=device), torch.tensor(OFFSETS, device=device), 17)
    generator = torch.Generator().manual_seed(9)
    x = torch.randn(43, INPUTS, generator=generator).to(device, dtype) / INPUTS**0.5
    y = torch.randn(43, sum(OUTPUTS), generator=generator).to(device, dtype)
    ours, theirs = y.clone(), y.clone()
    gpu.lora_expand(ours, gpu.lora_shrink(x, stack, segments), stack, segments)
    reference.lora_expand(theirs, reference.lora_shrink(x, stack, segments), stack, segments)
    assert torch.equal(ours[:5], y[:5])
    assert torch.equal(ours[40:], y[40:])
    assert (ours[5:40] != y[5:40]).any(1).all()
    assert_near(ours, theirs.double(), dtype, rank)


def test_a_row_does_not_depend_on_its_neighbours(device: torch.device) -> None:
    """Rows keep their places in a tile: the interpreter's products, which are numpy's, are not invariant otherwise."""
    stack = filled_stack(device, 16, torch.float32)
    x = torch.randn(43, INPUTS, generator=torch.Generator().manual_seed(9)).to(device)

    def delta(first: int, end: int, slots: list[int], offsets: list[int]) -> torch.Tensor:
        lengths = [after - before for before, after in itertools.pairwise(offsets)]
        segments = LoraSegments(torch.tensor(slots, device=device), torch.tensor(offsets, device=device), max(lengths))
        y = torch.zeros(end - first, sum(OUTPUTS), device=device)
        gpu.lora_expand(y, gpu.lora_shrink(x[first:end], stack, segments), stack, segments)
        return y

    whole = delta(0, 43, SLOTS, OFFSETS)
    assert torch.equal(delta(6, 23, [0], [0, 17]), whole[6:23])
    assert torch.equal(delta(22, 24, [0, 3], [0, 1, 2]), whole[22:24])


def test_rows_that_do_not_fit_are_refused(device: torch.device) -> None:
    stack = filled_stack(device, 8, torch.float32)
    segments = LoraSegments(torch.tensor([0], device=device), torch.tensor([0, 2], device=device), 2)
    with pytest.raises(ValueError, match="do not fit adapters"):
        gpu.lora_shrink(torch.zeros(2, INPUTS + 1, device=device), stack, segments)
    with pytest.raises(ValueError, match="do not fit adapters"):
        gpu.lora_expand(torch.zeros(2, 7, device=device), torch.zeros(2, 24, device=device), stack, segments)
