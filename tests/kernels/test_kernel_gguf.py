"""Compares weights packed from GGUF's blocks with the `gguf` package's values, as near as csrc/gguf_types.h says."""

import itertools
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
from gguf.constants import GGML_QUANT_SIZES, GGMLQuantizationType
from torch import Tensor

from benchmarks.quantized_checkpoints import FLOATS
from kernels.cpu import extension
from kernels.cpu.linear import PackedQuantizedWeight
from kernels.gguf_weight import PACKED_TYPES, GGUFPart, GGUFWeight
from kernels.load import ops, reference
from kernels.quantized import FloatWeight, RoundedWeight, StoredRows
from tests.gguf.random_blocks import random_blocks
from tests.kernels.test_kernel_quantized import check_rows_bits, dequantize, rounded_activations

OPS = ops(torch.device("cpu"))
pytestmark = pytest.mark.skipif(not extension.load(), reason="the kernels are not compiled here")
TYPES = sorted(PACKED_TYPES)
BITS = {"Q4_0": (4, False, 8), "Q4_1": (4, True, 0), "Q4_K": (4, True, 0)}
BITS |= dict.fromkeys(("Q5_1", "Q2_K", "Q5_K"), (8, True, 0))
QUANTS = {"Q2_K": (16, 80), "Q3_K": (0, 96), "Q4_K": (16, 144), "Q5_K": (16, 176), "Q6_K": (0, 192)}
"""The bytes of a block that are quants, by type."""

each_type = pytest.mark.parametrize("type", TYPES, ids=lambda type: type.name)


def part(type: GGMLQuantizationType, outputs: int, inputs: int = 768, seed: int = 0) -> GGUFPart:
    blocks = random_blocks(type, (outputs, inputs), np.random.default_rng(seed))
    return GGUFPart(type, torch.from_numpy(blocks), 0, inputs)


def pack(*parts: GGUFPart) -> PackedQuantizedWeight:
    packed = OPS.pack_linear(GGUFWeight(parts))
    assert isinstance(packed, PackedQuantizedWeight)
    return packed


def grid_end(own: GGUFPart, byte: int) -> Tensor:
    """Return the values (out, groups of 32, halves, 16) if all bytes of quants were `byte`."""
    blocks = own.blocks.clone()
    blocks[..., slice(*QUANTS[own.type.name])] = byte
    return grouped(own._replace(blocks=blocks).dequantize())


def grouped(values: Tensor) -> Tensor:
    return values.double().view(len(values), -1, 2, 16)


def bound(own: GGUFPart) -> Tensor:
    """Return how far packed values may be from the file's, (out, groups of 32, halves, 16)."""
    values, name = grouped(own.dequantize()), own.type.name
    rounding = 2.0**-11 * values.abs() + 2.0**-25 * 256  # of a scale, which may be subnormal
    match name:
        case "Q4_K" | "Q5_K":
            min = grid_end(own, 0)
            return 2.0**-11 * ((values - min).abs() + min.abs()) + rounding
        case "Q2_K":
            ends = torch.cat((grid_end(own, 0), grid_end(own, 0xFF)), 2)
            low, high = ends.amin((2, 3), keepdim=True), ends.amax((2, 3), keepdim=True)
            return (high - low) * (1 / 510 + 2.0**-11) + 2.0**-11 * low.abs() + rounding
        case "Q3_K" | "Q6_K":
            factor, quants = (32, 7) if name == "Q3_K" else (4, 63)
            scales = ((grid_end(own, 0xFF) - grid_end(own, 0)) / quants).abs()
            coarser = scales.amax((2, 3), keepdim=True)
            on_grid = (coarser - scales) < 1e-6 * coarser
            assert on_grid.all(2).any()  # some groups have equal scales, and some have not
            assert not on_grid.all()
            return torch.where(on_grid, 0, coarser / factor / 2 * 1.001) + rounding
        case "IQ4_XS":
            return rounding
    return 1e-6 * values.abs().amax((2, 3), keepdim=True)  # of float32: its float16 numbers are the file's


@each_type
def test_values_are_those_of_the_file(type: GGMLQuantizationType) -> None:
    own = part(type, 200)
    packed = pack(own)
    assert packed.format == BITS.get(type.name, (8, False, 128))
    assert (packed.outputs, packed.inputs) == (200, 768)
    error = (grouped(dequantize(packed)) - grouped(own.dequantize())).abs()
    assert (error <= bound(own)).all(), (error / bound(own)).max()
    ids = torch.tensor([3, 199, 3])
    assert torch.equal(reference().embedding(ids, reference().pack_linear(GGUFWeight([own]))), own.dequantize()[ids])


def test_halves_whose_scales_differ_in_the_sign_stay_on_their_grid() -> None:
    """The most distant quant of Q6_K, -32, has the other sign in the other half: +32 times 4 would not fit 8 bits."""
    own = part(GGMLQuantizationType.Q6_K, 40)
    own.blocks[::2, :, :192] = 0  # quants of -32
    scales = own.blocks[..., 192:208].view(torch.int8).clamp_(min=-127)
    scales[..., ::2] = -scales[..., 1::2]
    values = own.dequantize()
    assert ((dequantize(pack(own)) - values).abs() <= 2.0**-11 * values.abs() + 1e-6).all()


@each_type
def test_products(type: GGMLQuantizationType) -> None:
    own = part(type, 71)
    packed, x = pack(own), torch.randn(5, 768)
    out, rounded = OPS.linear(x, packed), rounded_activations(x, 32, 5.0)
    expected = rounded @ dequantize(packed).double().T
    assert (out - expected).abs().max() < 2e-5 * expected.abs().max()
    assert (out - x.double() @ own.dequantize().double().T).abs().max() < 0.03 * expected.abs().max()


def test_a_rows_bits_are_its_own() -> None:
    parts = [part(type, 70, 576) for type in TYPES if GGML_QUANT_SIZES[type][0] == 32]
    check_rows_bits(GGUFWeight(parts))


@each_type
def test_regions_are_packed_where_they_lie(type: GGMLQuantizationType) -> None:
    """A region's inputs are whole groups of 32, and begin or end in a block; rows of a head are two apart."""
    own = part(type, 90)
    whole, block = dequantize(pack(own)), GGML_QUANT_SIZES[type][0]
    for start, stop in ((0, 384), (384, 768), (32, 64), (224, 544)):
        blocks = own.blocks[:, start // block : -(-stop // block)]
        region = GGUFPart(type, blocks, start % block, stop - start)
        assert torch.equal(dequantize(pack(region)), whole[:, start:stop])
        rows = region._replace(blocks=blocks[7:71:2])
        assert torch.equal(dequantize(pack(rows)), whole[7:71:2, start:stop])
        assert torch.equal(rows.dequantize(), own.dequantize()[7:71:2, start:stop])


@pytest.mark.parametrize(
    "weight_of",
    [
        *(partial(FloatWeight, dtype) for dtype in (torch.float32, torch.bfloat16, torch.float16)),
        *(partial(RoundedWeight, bits) for bits in (8, 4)),
    ],
    ids=["float32", "bfloat16", "float16", "int8", "int4"],
)
@each_type
def test_dequantised_values_are_packed_from_the_blocks(type: GGMLQuantizationType, weight_of: Any) -> None:
    """To the bit as the package's values are: of a region, of rows of a head, and beside floats."""
    own, block = part(type, 90), GGML_QUANT_SIZES[type][0]
    region = GGUFPart(type, own.blocks[7:71:2, 224 // block : -(-544 // block)], 224 % block, 320)
    other, floats = part(type, 5, 768, seed=1), torch.randn(37, 320).bfloat16()
    other = other._replace(blocks=other.blocks[:, : -(-320 // block)], inputs=320)
    blocks = StoredRows([region, other], torch.zeros(37, 320))
    values = torch.cat([region.dequantize(), other.dequantize()])
    packed, expected = (OPS.pack_linear(weight_of([floats, rows, floats])) for rows in (blocks, values))
    assert torch.equal(packed.panels, expected.panels)


def test_who_does_not_read_blocks_gets_rows() -> None:
    own, rows = part(GGMLQuantizationType.Q4_0, 40), torch.randn(40, 768)
    weight = FloatWeight(torch.float32, [StoredRows([own], rows)])
    assert torch.equal(reference().pack_linear(weight), rows)


def test_parts_of_different_types_follow_one_another() -> None:
    """They all get the most general format, which changes no value."""
    parts = {type: part(type, 8 * number + 3, 256, seed=number) for number, type in enumerate(TYPES)}
    values = {type: dequantize(pack(part)) for type, part in parts.items()}
    for some in (*itertools.permutations(TYPES, 2), TYPES, TYPES[::-1]):
        whole = pack(*(parts[type] for type in some))
        bits, mins, _ = whole.format
        own = [BITS.get(type.name, (8, False, 128)) for type in some]
        assert (bits, mins) == (max(bits for bits, _, _ in own), any(mins for _, mins, _ in own))
        assert torch.equal(dequantize(whole), torch.cat([values[type] for type in some]))


@pytest.mark.parametrize("number", [float("inf"), float("nan")])
@pytest.mark.filterwarnings("ignore::RuntimeWarning")  # of the reference
@each_type
def test_a_broken_block_spoils_its_output_alone(type: GGMLQuantizationType, number: float) -> None:
    for place in FLOATS[type.name]:
        own = part(type, 40)
        numbers = own.blocks.view(torch.float16)
        numbers[7, 1, place] = number
        out = OPS.linear(torch.randn(3, 768), pack(own))
        assert torch.equal((~out.isfinite()).any(0), torch.arange(40) == 7)


@each_type
def test_blocks_that_do_not_fit_are_refused(type: GGMLQuantizationType) -> None:
    own = part(type, 5)
    for wrong in (own._replace(inputs=800), own._replace(first=32), own._replace(blocks=own.blocks[..., 1:])):
        with pytest.raises(RuntimeError, match="blocks"):
            pack(wrong)
        with pytest.raises(RuntimeError, match="blocks"):
            OPS.pack_linear(RoundedWeight(8, [StoredRows([wrong], torch.zeros(5, wrong.inputs))]))
    with pytest.raises(RuntimeError, match="type 16 are not packed"):
        pack(own._replace(type=GGMLQuantizationType.IQ2_XXS))
