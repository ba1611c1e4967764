"""Quantised weights, and matrix products with them, against float64 and against themselves in other batches."""

import itertools

import pytest
import torch
from torch import Tensor

from kernels.cpu import extension
from kernels.load import ops, reference
from kernels.ops import Ops
from kernels.quantized import QuantizedWeight, quantize, stack
from tests.kernels.tolerance import assert_near

OPS = ops(torch.device("cpu"))
pytestmark = pytest.mark.skipif(not extension.load(), reason="the kernels are not compiled here")
FORMATS = [(8, False), (8, True), (4, False), (4, True)]


def weight(outputs: int, inputs: int, bits: int, mins: bool, seed: int = 0) -> QuantizedWeight:
    torch.manual_seed(seed)
    groups = (outputs, inputs // 32)
    return QuantizedWeight(
        bits,
        torch.randint(0, 2**bits, (outputs, inputs), dtype=torch.uint8),
        (torch.rand(groups) * 0.1).half(),
        -torch.rand(groups).half() if mins else None,
        0 if mins else 2 ** (bits - 1),
    )


def by_hand(x: Tensor, w: QuantizedWeight) -> Tensor:
    """Return the product with `x` rounded to eight bits a group, and eight finer ones where a number stands out."""
    groups = x.double().view(len(x), -1, 32)
    largest = groups.abs().amax(-1, keepdim=True)
    scale = (largest / 127).clamp_min(1e-30)
    kept = (groups / scale).round() * scale
    finer = ((groups - kept) / (scale / 128)).round() * (scale / 128)
    outlier = largest > 5.0 * groups.square().mean(-1, keepdim=True).sqrt()
    return torch.where(outlier, kept + finer, kept).view(x.shape) @ w.dequantize().double().T


@pytest.mark.parametrize(("bits", "mins"), FORMATS)
@pytest.mark.parametrize(("outputs", "inputs"), [(71, 96), (32, 32), (5, 576)])
@pytest.mark.parametrize("count", [1, 5, 13])
def test_linear(bits: int, mins: bool, outputs: int, inputs: int, count: int) -> None:
    w = weight(outputs, inputs, bits, mins)
    x, bias = torch.randn(count, inputs), torch.randn(outputs)
    x[0, 3] = 40.0  # its group has a finer term
    x[-1, 32 * (inputs // 32 - 1) :] = 0.0
    out = OPS.linear(x, OPS.pack_linear(w), bias)
    expected = by_hand(x, w) + bias.double()
    assert (out - expected).abs().max() < 2e-5 * expected.abs().max()


def test_numbers_beside_a_large_one_are_not_lost() -> None:
    w, x = weight(40, 64, 8, False), torch.randn(3, 64) * 0.01
    x[:, 7] = 5.0
    expected = x.double() @ w.dequantize().double().T
    assert (OPS.linear(x, OPS.pack_linear(w), None) - expected).abs().max() < 1e-3 * expected.abs().max()


@pytest.mark.parametrize("implementation", [OPS, reference()], ids=["cpu", "reference"])
def test_groups_may_be_of_scattered_inputs(implementation: Ops) -> None:
    w, x, ids = weight(40, 96, 4, True), torch.randn(5, 96), torch.tensor([39, 0, 5])
    scattered = w._replace(order=torch.randperm(96))
    packed = implementation.pack_linear(scattered)
    out = implementation.linear(x, packed, None)
    if implementation is OPS:
        assert torch.equal(out, OPS.linear(x[:, scattered.order], OPS.pack_linear(w), None))
    assert (out - x.double() @ scattered.dequantize().double().T).abs().max() < 0.02 * out.abs().max()
    assert_near(implementation.embedding(ids, packed), scattered.dequantize()[ids], torch.float32)
    assert torch.equal(scattered.dequantize()[:, scattered.order], w.dequantize())
    assert stack([scattered, w]) is None
    assert stack([scattered, w._replace(order=scattered.order.clone())]) is not None


@pytest.mark.parametrize("bits", [4, 8])
def test_a_zero_point_may_be_any_quant(bits: int) -> None:
    x, w = torch.randn(3, 96), weight(40, 96, bits, False)
    for zero_point in (0, 5, 2**bits - 1):
        expected = by_hand(x, w._replace(zero_point=zero_point))
        out = OPS.linear(x, OPS.pack_linear(w._replace(zero_point=zero_point)), None)
        assert (out - expected).abs().max() < 2e-5 * expected.abs().max()


@pytest.mark.parametrize(("bits", "mins"), FORMATS)
def test_a_rows_bits_are_its_own(bits: int, mins: bool) -> None:
    packed, x = OPS.pack_linear(weight(200, 576, bits, mins)), torch.randn(140, 576)
    x[::3, 5] = 50.0
    before = torch.get_num_threads()
    try:
        torch.set_num_threads(1)
        whole = OPS.linear(x, packed, None)
        for threads, count, first in itertools.product((1, 2), (1, 2, 5, 7, 12, 33, 64, 100), (0, 1, 40)):
            torch.set_num_threads(threads)
            rows = slice(first, first + count)
            assert torch.equal(OPS.linear(x[rows], packed, None), whole[rows])
    finally:
        torch.set_num_threads(before)


@pytest.mark.parametrize(("bits", "mins"), FORMATS)
@pytest.mark.parametrize("implementation", [OPS, reference()], ids=["cpu", "reference"])
def test_rows(implementation: Ops, bits: int, mins: bool) -> None:
    w, ids = weight(71, 96, bits, mins), torch.tensor([70, 0, 31, 32, 31])
    rows = implementation.embedding(ids, implementation.pack_linear(w))
    assert_near(rows, w.dequantize()[ids], torch.float32)


def test_the_reference_multiplies_with_the_numbers_themselves() -> None:
    w, x = weight(11, 64, 4, True), torch.randn(3, 64)
    out = reference().linear(x, reference().pack_linear(w), None)
    assert_near(out, x.double() @ w.dequantize().double().T, torch.float32, 64)


@pytest.mark.parametrize(("bits", "bound"), [(8, 0.5 / 127), (4, 0.5 / 15 * 2)])
def test_rounding(bits: int, bound: float) -> None:
    original = torch.randn(7, 96)
    original[2, 32:64] = 0.0
    w = quantize(original, bits)
    error = (w.dequantize() - original).abs().view(7, 3, 32).amax(-1)
    assert (error <= bound * 1.01 * original.abs().view(7, 3, 32).amax(-1) + 1e-3 * (bits == 4)).all()
    assert torch.equal(w.dequantize()[2, 32:64], torch.zeros(32))
    assert int(w.quants.max()) < 2**bits


def test_stacking() -> None:
    parts = [weight(rows, 64, bits, mins, seed=rows) for rows, (bits, mins) in enumerate(FORMATS, 3)]
    for number in range(1, 5):
        for some in itertools.permutations(parts, number):
            whole = stack(some)
            assert whole is not None
            assert torch.equal(whole.dequantize(), torch.cat([part.dequantize() for part in some]))
            assert (whole.bits, whole.mins is None) == (
                max(p.bits for p in some),
                all(p.mins is None for p in some),
            )


def test_a_zero_point_that_is_no_power_of_two_is_rounded_among_others() -> None:
    odd, other = weight(9, 64, 4, False)._replace(zero_point=7), weight(3, 64, 4, True)
    whole = stack([odd, other])
    assert whole is not None
    error = (whole.dequantize()[:9] - odd.dequantize()).abs().view(9, 2, 32).amax(-1)
    assert 0 < (error / odd.scales.float()).max() < 7 * 2.0**-11
