"""Quantised weights, and matrix products with them, against float64 and against themselves in other batches."""

import itertools
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor

from kernels import quantized
from kernels.cpu import extension
from kernels.cpu.linear import Packed
from kernels.load import ops, reference
from kernels.ops import Ops
from kernels.quantized import FloatWeight, Layout, QuantizedWeight, RoundedWeight, Weight, stack
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


def rounded_activations(x: Tensor, group_size: int, outlier_ratio: float) -> Tensor:
    """Return `x` rounded to eight bits a group, and eight finer ones where a number stands out."""
    parts = []
    for group in x.double().split(group_size, 1):
        largest = group.abs().amax(-1, keepdim=True)
        scale = (largest / 127).clamp_min(1e-30)
        kept = (group / scale).round() * scale
        finer = ((group - kept) / (scale / 128)).round() * (scale / 128)
        outlier = largest > outlier_ratio * group.square().mean(-1, keepdim=True).sqrt()
        parts.append(torch.where(outlier, kept + finer, kept))
    return torch.cat(parts, 1)


def by_hand(x: Tensor, w: QuantizedWeight) -> Tensor:
    return rounded_activations(x, 32, 5.0) @ w.dequantize().double().T


def dequantize(packed: Packed) -> Tensor:
    """Return the weight (out, in) that a packed one stands for, row by row."""
    return OPS.embedding(torch.arange(packed.outputs), packed)


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


@pytest.mark.parametrize(
    "unpacked",
    [
        *itertools.starmap(partial(weight, 200, 576), FORMATS),
        *(RoundedWeight(b, [torch.randn(200, 576)]) for b in (8, 4)),
    ],
)
def test_a_rows_bits_are_its_own(unpacked: QuantizedWeight | RoundedWeight) -> None:
    check_rows_bits(unpacked)


def check_rows_bits(unpacked: Weight) -> None:
    """Check that a row's product with a weight of 576 inputs has the same bits beside any others, on any threads."""
    packed, x = OPS.pack_linear(unpacked), torch.randn(140, 576)
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


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_eight_bits_have_a_scale_for_each_output(dtype: torch.dtype) -> None:
    original = (torch.randn(71, 96) * torch.logspace(-2, 2, 71)[:, None]).to(dtype)
    original[5] = 0.0
    rounded = dequantize(OPS.pack_linear(RoundedWeight(8, [original]))).double()
    scale = original.double().abs().amax(1, keepdim=True) / 127
    assert ((rounded - original.double()).abs() <= 0.5001 * scale).all()
    wholes = rounded / scale.clamp_min(1e-30)
    assert (wholes - wholes.round()).abs().max() < 1e-3


def samples() -> list[Tensor]:
    """Return weights (out, in) of ordinary and unusual numbers, in parts of all types and strides."""
    ordinary = torch.randn(77, 416) * torch.logspace(-3, 2, 77)[:, None]
    ordinary[3] = 0.0
    ordinary[4] = 1.0
    ordinary[5, :64] = torch.linspace(-5, 5, 64)
    ordinary[6, 100] = 1e4  # all others are rounded to a few bytes
    ordinary[7] = 1e-36
    return [ordinary, ordinary.bfloat16(), ordinary.half()[:11], torch.randn(416, 30).bfloat16().T]


def test_eight_bits_are_these_bytes() -> None:
    """To the bit, as arithmetic in float32 gives them."""
    parts = samples()
    x = torch.cat([part.float() for part in parts])
    scale, factor = scale_and_factor(x)
    u = (x * factor).round().int() + 128
    panels = OPS.pack_linear(RoundedWeight(8, parts)).panels[: len(x) // 32]
    stored = panels[:, : 416 * 32].view(-1, 104, 32, 4).transpose(1, 2).reshape(-1, 416)
    assert torch.equal(stored, u[: len(stored)].byte())
    assert torch.equal(panels[:, 416 * 32 :].view(torch.float32).reshape(-1), scale[: len(stored), 0])


def test_four_bits_are_these_bytes() -> None:
    """To the bit: of two scales next to each other the one whose squared error is less."""
    parts = samples()
    x = torch.cat([part.float() for part in parts])
    scale, factor = scale_and_factor(x)
    v = (x * factor + 128).view(len(x), -1, 32)
    lowest, range = v.amin(-1, keepdim=True), v.amax(-1, keepdim=True) - v.amin(-1, keepdim=True)
    floor = (range / 15).floor().clamp_min(1)
    small, large = (four_bits(v, lowest, range, scale) for scale in (floor, (floor + 1).clamp_max(17)))
    is_small = small[0] <= large[0]
    assert 0.2 < is_small.float().mean() < 0.8
    _, group_scale, min, quants = (torch.where(is_small, *both) for both in zip(small, large, strict=True))
    panels = OPS.pack_linear(RoundedWeight(4, parts)).panels[: len(x) // 32]
    records = panels[:, : 13 * 576].view(-1, 13, 576)
    nibbles = records[..., :512].view(-1, 13, 4, 32, 4).permute(0, 3, 1, 2, 4).reshape(-1, 13, 16)
    assert torch.equal(torch.cat((nibbles & 15, nibbles >> 4), -1), quants[: len(nibbles)].byte())
    for stored, expected in ((records[..., 512:544], group_scale), (records[..., 544:], min)):
        assert torch.equal(stored.transpose(1, 2).reshape(-1, 13), expected[: len(nibbles), :, 0].byte())
    assert torch.equal(panels[:, 13 * 576 :].view(torch.float32).reshape(-1), scale[: len(nibbles), 0])


def scale_and_factor(x: Tensor) -> tuple[Tensor, Tensor]:
    scale = x.abs().amax(1, keepdim=True) / 127
    return scale, torch.where(scale >= 1e-30, 1 / scale, 0)


def four_bits(v: Tensor, lowest: Tensor, range: Tensor, scale: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return the squared errors, scales, mins and quants of groups v (..., 32), for whole scales."""
    min = (lowest + (range - 15 * scale) / 2).round().clamp(0, 255)
    quants = ((v - min) * (1 / scale)).round().clamp_min(0).minimum(((255 - min) / scale).floor().clamp_max(15))
    error = (v - (quants * scale + min)).double()
    sums = (error[..., :16].square().float().double() + error[..., 16:].square()).float()  # fused multiply-adds
    while sums.shape[-1] > 1:  # halves are added, as over the lanes of a register
        sums = sums[..., : sums.shape[-1] // 2] + sums[..., sums.shape[-1] // 2 :]
    return sums, scale, min, quants


def test_four_bits_are_whole_steps_of_eight() -> None:
    torch.manual_seed(0)
    original = torch.randn(71, 192)
    original[2, 32:64] = 0.0
    original[3, 64:96] = 1.0
    original[4, :32] = torch.linspace(-5, 5, 32)  # the whole range of the eight bits
    rounded = dequantize(OPS.pack_linear(RoundedWeight(4, [original]))).double()
    scale = original.double().abs().amax(1, keepdim=True) / 127
    wholes = rounded / scale
    assert (wholes - wholes.round()).abs().max() < 1e-3
    assert wholes.abs().max() <= 128.01
    groups, units = wholes.round().view(71, 6, 32), (original.double() / scale).view(71, 6, 32)
    assert all(len(group.unique()) <= 16 for output in groups for group in output)
    # The best of two steps is at most one and a bit times too coarse, and leaves out at most half a step at each end.
    step = ((units.amax(-1) - units.amin(-1)) / 15).floor() + 1
    assert ((groups - units).abs().amax(-1) <= 0.5 * step + 8.5).all()
    assert ((groups - units).square().mean(-1).sqrt() <= 0.33 * step + 0.3).all()
    assert torch.equal(rounded[2, 32:64], torch.zeros(32, dtype=torch.float64))


@pytest.mark.parametrize("bits", [8, 4])
@pytest.mark.parametrize(("outputs", "inputs"), [(71, 96), (32, 32), (5, 576), (40, 256)])
@pytest.mark.parametrize("count", [1, 3, 5, 13])
def test_linear_with_rounded_weights(bits: int, outputs: int, inputs: int, count: int) -> None:
    packed = OPS.pack_linear(RoundedWeight(bits, [torch.randn(outputs, inputs)]))
    x, bias = torch.randn(count, inputs), torch.randn(outputs)
    x[0, 3] = 40.0  # its group has a finer term, if it is large enough
    x[-1, 32 * (inputs // 32 - 1) :] = 0.0
    out = OPS.linear(x, packed, bias)
    expected = rounded_activations(x, 128, 7.0) @ dequantize(packed).double().T + bias.double()
    assert (out - expected).abs().max() < 2e-5 * expected.abs().max()


@pytest.mark.parametrize("bits", [8, 4])
def test_rounded_parts_follow_one_another(bits: int) -> None:
    parts = [torch.randn(outputs, 64, dtype=dtype) for outputs, dtype in ((40, torch.float32), (3, torch.bfloat16))]
    parts.append(torch.randn(64, 30).T)  # not contiguous
    whole = OPS.pack_linear(RoundedWeight(bits, parts))
    assert whole.outputs == 73
    each = [dequantize(OPS.pack_linear(RoundedWeight(bits, [part]))) for part in parts]
    assert torch.equal(dequantize(whole), torch.cat(each))


@pytest.mark.parametrize("bits", [8, 4])
def test_a_weight_that_is_no_number_spoils_its_output_alone(bits: int) -> None:
    original, x = torch.randn(40, 64), torch.randn(3, 64)
    original[7, 40] = float("nan")
    out = OPS.linear(x, OPS.pack_linear(RoundedWeight(bits, [original])), None)
    assert torch.equal(out.isnan().any(0), torch.arange(40) == 7)


def test_an_activation_that_is_no_number_spoils_its_row_alone() -> None:
    x = torch.randn(5, 256)
    x[2, 130] = float("nan")
    out = OPS.linear(x, OPS.pack_linear(RoundedWeight(8, [torch.randn(40, 256)])), None)
    assert torch.equal(out.isnan().all(1), torch.arange(5) == 2)
    assert not out[[0, 1, 3, 4]].isnan().any()


@pytest.mark.parametrize("unpacked", [weight(40, 64, 4, True), RoundedWeight(4, [torch.randn(40, 64)])])
def test_activations_may_be_almost_zero(unpacked: QuantizedWeight | RoundedWeight) -> None:
    """The inverses of their scales are no float32 numbers."""
    packed = OPS.pack_linear(unpacked)
    for size in (1e-36, 1e-37, 1e-38, 1e-45):
        for rows in (1, 9):
            x = torch.full((rows, 64), size)
            x[0, 3] = 1e-33
            assert OPS.linear(x, packed, None).abs().max() < 1e-29


@pytest.mark.parametrize("bits", [4, 8])
def test_stacking(bits: int) -> None:
    parts = [weight(rows, 64, bits, mins, seed=rows) for rows, mins in enumerate((False, True, False), 3)]
    for number in range(1, 4):
        for some in itertools.permutations(parts, number):
            whole = stack(some)
            assert whole is not None
            assert torch.equal(whole.dequantize(), torch.cat([part.dequantize() for part in some]))
            assert {part.mins is None for part in whole.parts} == {all(part.mins is None for part in some)}
            assert torch.equal(dequantize(OPS.pack_linear(whole)), whole.dequantize())


def test_a_zero_point_that_is_no_power_of_two_is_rounded_among_others() -> None:
    odd, other = weight(9, 64, 4, False)._replace(zero_point=7), weight(3, 64, 4, True)
    whole = stack([odd, other])
    assert whole is not None
    error = (whole.dequantize()[:9] - odd.dequantize()).abs().view(9, 2, 32).amax(-1)
    assert 0 < (error / odd.scales.float()).max() < 7 * 2.0**-11


def stored(layout: Layout, bits: int, group_size: int, outputs: int, inputs: int, mins: bool) -> QuantizedWeight:
    """Return a weight of random quants as a file of that layout has them."""
    shape = (inputs * bits // 32, outputs) if layout == "gptq" else (inputs, outputs // 8)
    quants = torch.randint(-(2**31), 2**31, shape).int()
    groups = (-(-inputs // group_size), outputs)
    return QuantizedWeight(
        bits,
        quants,
        torch.rand(groups).half().T,
        -torch.rand(groups).half().T if mins else None,
        0 if mins else 2 ** (bits - 1),
        torch.randperm(inputs) if mins else None,
        layout,
        group_size,
    )


LAYOUTS: list[tuple[Layout, int, int]] = [
    ("gptq", 4, 32),
    ("gptq", 8, 128),
    ("gptq", 4, 192),
    ("awq", 4, 64),
]


@pytest.mark.parametrize("mins", [False, True])
@pytest.mark.parametrize(("layout", "bits", "group_size"), LAYOUTS)
def test_quants_are_packed_as_files_have_them(layout: Layout, bits: int, group_size: int, mins: bool) -> None:
    """Parts begin within a panel, and the last group may be of fewer inputs."""
    parts = [stored(layout, bits, group_size, outputs, 192 + 32, mins) for outputs in (40, 8, 72, 64)]
    parts = [part._replace(order=parts[0].order) for part in parts]
    whole = stack(parts)
    assert whole is not None
    copied = stack([part.unpacked() for part in parts])
    assert copied is not None
    assert {part.layout for part in copied.parts} == {"rows"}
    ids = torch.arange(40 + 8 + 72 + 64)
    packed, expected = (OPS.embedding(ids, OPS.pack_linear(weight)) for weight in (whole, copied))
    assert torch.equal(packed, expected)
    assert torch.equal(packed, whole.dequantize())
    assert torch.equal(whole.dequantize(), torch.cat([part.dequantize() for part in parts]))


class ComputedRows:
    """A matrix whose rows are copied when they are asked for."""

    def __init__(self, rows: Tensor) -> None:
        self.rows, self.shape, self.most = rows, rows.shape, 0

    def __getitem__(self, rows: slice) -> Tensor:
        self.most = max(self.most, len(self.rows[rows]))
        return self.rows[rows].clone()


@pytest.mark.parametrize("weight_of", [partial(RoundedWeight, 8), partial(FloatWeight, torch.float32)])
@pytest.mark.parametrize("implementation", [OPS, reference()], ids=["cpu", "reference"])
def test_rows_are_computed_in_blocks(implementation: Ops, weight_of: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(quantized, "_BLOCK", 64 * 96)
    parts = [torch.randn(71, 96), torch.randn(200, 96, dtype=torch.float64), torch.randn(3, 96)]
    computed = [parts[0], ComputedRows(parts[1]), ComputedRows(parts[2])]
    if implementation is not OPS and isinstance(weight_of(parts), RoundedWeight):
        pytest.skip("it does not round")
    ids = torch.arange(274)
    rows = [implementation.embedding(ids, implementation.pack_linear(weight_of(p))) for p in (parts, computed)]
    assert torch.equal(*rows)
    assert [part.most for part in computed if isinstance(part, ComputedRows)] == [64, 3]
