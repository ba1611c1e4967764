"""Weights with a table for each output, and matrix products with them, against float64 and in other batches."""

import pytest
import torch
from torch import Tensor

from kernels.cpu import extension
from kernels.load import ops, reference
from kernels.ops import Ops
from kernels.table_weight import Outliers, TablePart, TableWeight
from tests.kernels.test_kernel_quantized import check_rows_bits, dequantize, rounded_activations
from tests.kernels.tolerance import assert_near

OPS = ops(torch.device("cpu"))
pytestmark = pytest.mark.skipif(not extension.load(), reason="the kernels are not compiled here")
IMPLEMENTATIONS = pytest.mark.parametrize("implementation", [OPS, reference()], ids=["cpu", "reference"])


def part(outputs: int, inputs: int, *, share: float = 0.0, dtype: torch.dtype = torch.float16) -> TablePart:
    """Return outputs with random codes and tables, and this share of outliers."""
    torch.manual_seed(outputs * inputs)
    codes = torch.randint(-(2**31), 2**31, (inputs // 8, outputs)).int()
    tables = (torch.randn(outputs, 16) * torch.rand(outputs, 1)).to(dtype)
    return TablePart(codes, tables, outliers(outputs, inputs, share) if share else None)


def outliers(outputs: int, inputs: int, share: float) -> Outliers:
    places = torch.rand(outputs, inputs) < share
    offsets = torch.cat((torch.zeros(1).long(), places.sum(1).cumsum(0)))
    return Outliers(offsets, places.nonzero()[:, 1].int(), torch.randn(int(places.sum())) * 8)


def by_hand(weight: TableWeight) -> Tensor:
    """Return the weight (out, in) in float64."""
    rows = []
    for codes, tables, extra in weight.parts:
        for output in range(len(tables)):
            words = [int(word) & 0xFFFFFFFF for word in codes[:, output]]
            row = [tables[output, word >> 4 * i & 15].item() for word in words for i in range(8)]
            if extra:
                for entry in range(int(extra.offsets[output]), int(extra.offsets[output + 1])):
                    row[int(extra.inputs[entry])] += extra.values[entry].item()
            rows.append(row)
    return torch.tensor(rows, dtype=torch.float64)


CASES = [
    TableWeight([part(71, 96)]),
    TableWeight([part(32, 32, dtype=torch.float32)]),
    TableWeight([part(5, 576, share=0.02)]),
    TableWeight([part(40, 160, dtype=torch.bfloat16), part(3, 160, share=0.1), part(64, 160, share=0.01)]),
]


@pytest.mark.parametrize("weight", CASES)
def test_dequantised_numbers_are_exact(weight: TableWeight) -> None:
    assert weight.shape == by_hand(weight).shape
    assert_near(weight.dequantize(), by_hand(weight), torch.float32)


def test_outliers_of_one_place_add_up() -> None:
    both = Outliers(torch.tensor([0, 2]), torch.tensor([5, 5]).int(), torch.tensor([1.0, 2.0]))
    weight = part(1, 32)
    alone, x = TableWeight([weight]), torch.zeros(1, 32)
    x[0, 5] = 1.0
    for implementation in (OPS, reference()):
        difference = [
            implementation.linear(x, implementation.pack_linear(some), None)
            for some in (TableWeight([weight._replace(outliers=both)]), alone)
        ]
        assert (difference[0] - difference[1] - 3).abs().max() < 1e-6


@pytest.mark.parametrize("weight", CASES)
def test_a_packed_table_is_rounded_to_thirteen_bits(weight: TableWeight) -> None:
    largest = torch.cat([part.tables.float().abs().amax(1) for part in weight.parts])
    error = (dequantize(OPS.pack_linear(weight)) - by_hand(weight)).abs().amax(1)
    assert (error <= largest / 8190 * 1.001 + 1e-6).all()
    assert error.max() > 0


@pytest.mark.parametrize("weight", CASES)
@pytest.mark.parametrize("count", [1, 2, 3, 5, 13])
def test_linear(weight: TableWeight, count: int) -> None:
    packed, (outputs, inputs) = OPS.pack_linear(weight), weight.shape
    torch.manual_seed(count)  # a number halfway between two of eight bits may be rounded to the other one in float64
    x, bias = torch.randn(count, inputs), torch.randn(outputs)
    x[0, 3] = 40.0  # its group has a finer term
    x[-1, 32 * (inputs // 32 - 1) :] = 0.0
    extra = torch.zeros(weight.shape)
    if weight.outliers:
        weight.outliers.add_to(extra)
    tables = dequantize(packed).double() - extra.double()
    expected = rounded_activations(x, 32, 5.0) @ tables.T + x.double() @ extra.double().T + bias.double()
    assert (OPS.linear(x, packed, bias) - expected).abs().max() < 2e-5 * expected.abs().max()


def test_sums_of_the_largest_numbers_do_not_overflow() -> None:
    tables = torch.tensor([[1.0] * 8 + [-1.0] * 8]).repeat(40, 1)
    for codes, value in ((0, 1.0), (-0x77777778, -1.0)):  # all codes are 0, or 8
        weight = TableWeight([TablePart(torch.full((32, 40), codes, dtype=torch.int32), tables)])
        for rows in (1, 2, 7):
            out = OPS.linear(torch.ones(rows, 256), OPS.pack_linear(weight), None)
            assert (out - 256 * value).abs().max() < 1e-3


@pytest.mark.parametrize("share", [0.0, 0.01])
def test_a_rows_bits_are_its_own(share: float) -> None:
    check_rows_bits(TableWeight([part(200, 576, share=share)]))


@IMPLEMENTATIONS
@pytest.mark.parametrize("weight", CASES)
def test_rows(implementation: Ops, weight: TableWeight) -> None:
    ids = torch.tensor([4, 0, 4]) if weight.shape[0] == 5 else torch.tensor([weight.shape[0] - 1, 0, 31, 17, 31])
    rows = implementation.embedding(ids, implementation.pack_linear(weight))
    assert (rows - weight.dequantize()[ids]).abs().max() < 1e-3


def test_the_reference_multiplies_with_the_numbers_themselves() -> None:
    weight, x = CASES[3], torch.randn(3, 160)
    out = reference().linear(x, reference().pack_linear(weight), None)
    assert_near(out, x.double() @ by_hand(weight).T, torch.float32, 160)


@pytest.mark.parametrize("size", [0.0, 1e-38, 1e-42])
def test_tables_may_be_almost_zero(size: float) -> None:
    weight = TableWeight([TablePart(part(40, 64).codes, torch.full((40, 16), size))])
    assert OPS.linear(torch.ones(3, 64), OPS.pack_linear(weight), None).abs().max() < 1e-35


def test_an_activation_that_is_no_number_spoils_its_row_alone() -> None:
    x = torch.randn(5, 256)
    x[2, 130] = torch.nan
    out = OPS.linear(x, OPS.pack_linear(TableWeight([part(40, 256, share=0.01)])), None)
    assert torch.equal(out.isnan().all(1), torch.arange(5) == 2)
    assert not out[[0, 1, 3, 4]].isnan().any()


def test_wrong_parts_are_refused() -> None:
    good = part(40, 64)
    for wrong in (
        TableWeight([good, part(3, 96)]),
        TableWeight([good._replace(tables=good.tables[:, :8].contiguous())]),
        TableWeight([good._replace(codes=good.codes.long())]),
        TableWeight([part(40, 40)]),
    ):
        with pytest.raises(RuntimeError, match=r"codes|tables|multiple of 32"):
            OPS.pack_linear(wrong)
    packed = OPS.pack_linear(TableWeight([part(40, 64, share=0.1)]))
    with pytest.raises(RuntimeError, match="outliers must be"):
        OPS.linear(torch.ones(1, 64), packed._replace(outliers=packed.outliers[::-1]), None)
    with pytest.raises(RuntimeError, match="another number of outputs"):
        OPS.linear(torch.ones(1, 64), packed._replace(outputs=80), None)
