"""Norms, rotation, activation, matrix product and lookup against float64 loops."""

import itertools
import math
from functools import partial

import pytest
import torch
from torch import Tensor

from kernels.cpu import extension
from kernels.decoder_layers import LayerConfig
from kernels.load import ops, reference
from kernels.ops import Ops
from kernels.quantized import FloatWeight
from tests.kernels.tolerance import assert_near

OPS = ops(torch.device("cpu"))
DTYPES = [torch.float32, torch.bfloat16, torch.float16]


def rows(count: int, width: int, dtype: torch.dtype = torch.float32) -> Tensor:
    """A view that is not contiguous."""
    torch.manual_seed(count * width)
    return torch.randn(count, width + 3).to(dtype)[:, 1:-2]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("count", "width"), [(1, 1), (3, 7), (5, 130)])
def test_rms_norm(count: int, width: int, dtype: torch.dtype) -> None:
    x, weight = rows(count, width, dtype), torch.randn(width).to(dtype)
    expected = torch.stack([row.double() / (row.double().square().mean() + 1e-5).sqrt() * weight.double() for row in x])
    assert_near(OPS.rms_norm(x, weight, 1e-5), expected, dtype)


@pytest.mark.parametrize("dtype", DTYPES)
def test_layer_norm(dtype: torch.dtype) -> None:
    x, weight, bias = rows(4, 33, dtype), torch.randn(33).to(dtype), torch.randn(33).to(dtype)
    wide = x.double()
    centred = wide - wide.mean(-1, keepdim=True)
    expected = centred / (centred.square().mean(-1, keepdim=True) + 1e-5).sqrt() * weight.double() + bias.double()
    assert_near(OPS.layer_norm(x, weight, bias, 1e-5), expected, dtype)


def test_norms_of_sums_give_the_sum_too() -> None:
    x, residual, weight = rows(4, 33), rows(4, 33).flip(0), torch.randn(33)
    before = residual.clone()
    normed, total = OPS.add_rms_norm(x, residual, weight, 1e-5)
    assert torch.equal(total, x + residual)
    assert torch.equal(normed, OPS.rms_norm(x + residual, weight, 1e-5))
    normed, total = OPS.add_layer_norm(x, residual, weight, None, 1e-5)
    assert torch.equal(total, x + residual)
    assert torch.equal(normed, OPS.layer_norm(x + residual, weight, None, 1e-5))
    assert torch.equal(residual, before)


@pytest.mark.parametrize("norm", ["no norm", "norm", "wide norm"])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("dim", "rotated"), [(8, 8), (10, 6), (4, 2), (5, 0)])
@pytest.mark.parametrize("implementation", [OPS, reference()], ids=["cpu", "reference"])
def test_rotate_and_store(implementation: Ops, dim: int, rotated: int, dtype: torch.dtype, norm: str) -> None:
    """Five tokens with five heads of queries and two of keys and values, at positions out of order."""
    qkv = rows(5 * 9, dim, dtype).view(5, 9, dim)
    angles = torch.outer(torch.arange(20.0), torch.rand(rotated // 2)).repeat(1, 2)
    positions, slots = torch.tensor([7, 0, 19, 3, 4]), torch.tensor([2, 9, 0, 11, 5])
    norms = torch.rand(2, dim).add(0.5).to(torch.float32 if norm == "wide norm" else dtype)
    expected = qkv.double().clone()
    for token, head in itertools.product(range(5), range(7)):
        x = expected[token, head]
        if norm != "no norm":
            x *= norms[int(head >= 5)].double() / (x.square().mean() + 1e-5).sqrt()
        for i in range(rotated // 2):
            angle = angles[positions[token], i].double()
            a, b = x[i].item(), x[i + rotated // 2].item()
            x[i], x[i + rotated // 2] = a * angle.cos() - b * angle.sin(), b * angle.cos() + a * angle.sin()
    layout = implementation.kv_layout(1, 2, dim, 4, dtype)
    keys, values = layout.views(layout.allocate(3, torch.device("cpu")))[0]
    before = qkv.clone()
    q = implementation.rotate_and_store(
        qkv,
        keys,
        values,
        slots,
        positions=positions,
        cos_sin=(angles.cos(), angles.sin()) if rotated else None,
        norms=None if norm == "no norm" else (norms[0], norms[1]),
        eps=1e-5,
    )
    assert q.dtype == dtype
    assert_near(q, expected[:, :5], dtype, 4)
    keys, values = layout.vectors(keys, values)
    assert_near(keys[slots // 4, :, slots % 4], expected[:, 5:7], dtype, 4)
    assert torch.equal(values[slots // 4, :, slots % 4], qkv[:, 7:])
    assert torch.equal(qkv, before)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("implementation", [OPS, reference()], ids=["cpu", "reference"])
def test_activations(implementation: Ops, dtype: torch.dtype) -> None:
    x = rows(5, 14, dtype) * 3
    x[0, 0], x[1, 1] = -200.0, 200.0
    before, gate, up = x.clone(), x[:, :7].double(), x[:, 7:].double()

    def gelu(v: Tensor) -> Tensor:
        return v / 2 * (1 + torch.tanh(math.sqrt(2 / math.pi) * (v + 0.044715 * v**3)))

    assert_near(implementation.silu_and_mul(x), gate / (1 + (-gate).exp()) * up, dtype)
    assert_near(implementation.gelu_tanh_and_mul(x), gelu(gate) * up, dtype)
    assert_near(implementation.gelu_tanh(x), gelu(x.double()), dtype)
    assert torch.equal(implementation.relu(x), x.clamp(min=0))
    assert torch.equal(x, before)


@pytest.mark.parametrize("normalised", [True, False])
def test_route(normalised: bool) -> None:
    logits = rows(6, 9)
    shares, chosen = OPS.route(logits, 3, normalised)
    for row in range(6):
        weights = logits[row].double().exp() / logits[row].double().exp().sum()
        best = sorted(range(9), key=lambda expert: -weights[expert])[:3]
        assert chosen[row].tolist() == best
        expected = weights[best] / (weights[best].sum() if normalised else 1)
        assert_near(shares[row], expected, torch.float32)


@pytest.mark.parametrize("dtype", DTYPES)
def test_mix_experts(dtype: torch.dtype) -> None:
    """Expert e multiplies by e + 1; expert 2 is used by nobody, and must not be called."""
    x, shares = rows(5, 7, dtype), rows(5, 2).abs()
    chosen = torch.tensor([[0, 1], [3, 0], [1, 3], [3, 1], [0, 3]])
    called = []

    def expert(number: int, part: Tensor) -> Tensor:
        called.append((number, len(part)))
        return part * (number + 1)

    out = OPS.mix_experts(x, shares, chosen, [partial(expert, number) for number in range(4)])
    assert called == [(0, 3), (1, 3), (3, 4)]
    assert out.dtype == dtype
    assert_near(out, ((chosen + 1) * shares.double()).sum(-1, keepdim=True) * x.double(), dtype)


def test_a_norms_weight_may_be_wider_than_its_input() -> None:
    x, weight = rows(5, 33, torch.bfloat16), 1 + torch.randn(33) * 0.01
    expected = x.double() / (x.double().square().mean(-1, keepdim=True) + 1e-5).sqrt() * weight.double()
    out = OPS.rms_norm(x, weight, 1e-5)
    assert torch.equal(out, expected.to(torch.bfloat16))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("implementation", [OPS, reference()], ids=["cpu", "reference"])
@pytest.mark.parametrize("count", [1, 2, 5])
def test_linear(implementation: Ops, dtype: torch.dtype, count: int) -> None:
    x, weight, bias = rows(count, 37, dtype), rows(11, 37, dtype), torch.randn(11).to(dtype)
    product = x.double() @ weight.double().T
    packed = implementation.pack_linear(weight)
    assert_near(implementation.linear(x, packed, None), product, dtype, 37)
    assert_near(implementation.linear(x, packed, bias), product + bias.double(), dtype, 37)
    assert implementation.linear(x, packed, bias).dtype == dtype


@pytest.mark.skipif(not extension.load(), reason="the kernels are not compiled here")
def test_a_type_without_kernels_is_an_error() -> None:
    with pytest.raises(RuntimeError, match="no kernel"):
        OPS.linear(rows(3, 7), OPS.pack_linear(rows(4, 7).double()), None)


@pytest.mark.skipif(not extension.load(), reason="the kernels are not compiled here")
def test_a_field_that_only_one_side_knows_is_an_error() -> None:
    config = LayerConfig(1, 1, 16, 1.0, 0.0, 1e-5, "silu_and_mul")._asdict()
    torch.classes.quire.DecoderLayers(config)
    with pytest.raises(RuntimeError, match="the field other is not known here"):
        torch.classes.quire.DecoderLayers({**config, "other": 1})
    with pytest.raises(RuntimeError, match="the field eps is missing"):
        torch.classes.quire.DecoderLayers({name: value for name, value in config.items() if name != "eps"})


@pytest.mark.parametrize("stored", DTYPES)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("sizes", [(1,), (5, 40, 19), (32, 64), (33, 1, 200)])
def test_parts_are_packed_as_their_concatenation(
    sizes: tuple[int, ...], dtype: torch.dtype, stored: torch.dtype
) -> None:
    """To the bit, from wherever they lie: rows of a larger tensor, a transpose, and overlapping windows."""
    inputs = 300
    parts = [rows(size, inputs, stored) for size in sizes]
    parts[-1] = rows(inputs, sizes[-1], stored).T
    parts[0] = rows(1, sizes[0] + inputs - 1, stored)[0].unfold(0, inputs, 1)
    whole = torch.cat(parts).to(dtype)
    assert torch.equal(reference().pack_linear(FloatWeight(dtype, parts)), whole)
    ids, packed = torch.arange(len(whole)), OPS.pack_linear(FloatWeight(dtype, parts))
    assert torch.equal(OPS.embedding(ids, packed), whole.float() if extension.load() else whole)
    if extension.load():
        padded = torch.cat((whole, whole.new_zeros(-len(whole) % 32, inputs)))
        stays = dtype == torch.float32 and stored.itemsize == 2
        assert packed.panels.dtype == (stored if stays else dtype)
        assert torch.equal(packed.panels.to(dtype), padded.view(-1, 32, inputs).transpose(1, 2))


@pytest.mark.parametrize("stored", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("tokens", [1, 2, 3, 13, 100])
def test_a_weight_that_stays_in_16_bits_gives_the_same_results(tokens: int, stored: torch.dtype) -> None:
    weight, x = rows(70, 300, stored), rows(tokens, 300)
    narrow = OPS.pack_linear(FloatWeight(torch.float32, [weight]))
    wide = OPS.pack_linear(FloatWeight(torch.float32, [weight.float()]))
    widened = OPS.pack_linear(weight.float())
    assert torch.equal(OPS.linear(x, narrow, None), OPS.linear(x, wide, None))
    assert torch.equal(OPS.logits(x, narrow), OPS.logits(x, wide))
    if extension.load():
        assert (narrow.panels.dtype, wide.panels.dtype, widened.panels.dtype) == (stored, torch.float32, stored)
        assert torch.equal(widened.panels, narrow.panels)


def test_a_weight_with_parts_of_several_types_is_packed_in_the_type_asked_for() -> None:
    parts = [rows(40, 300, torch.bfloat16), rows(30, 300, torch.float16), rows(30, 300)]
    packed = OPS.pack_linear(FloatWeight(torch.float32, parts))
    assert torch.equal(OPS.embedding(torch.arange(100), packed), torch.cat([part.float() for part in parts]))


@pytest.mark.skipif(not extension.load(), reason="the kernels are not compiled here")
def test_parts_of_different_widths_are_refused() -> None:
    with pytest.raises(RuntimeError, match="equally many inputs"):
        OPS.pack_linear(FloatWeight(torch.float32, [torch.ones(4, 3), torch.ones(4, 2)]))


@pytest.mark.parametrize("implementation", [OPS, reference()], ids=["cpu", "reference"])
def test_rows_of_a_packed_weight(implementation: Ops) -> None:
    weight, ids = rows(71, 37), torch.tensor([70, 0, 31, 32, 31])
    assert torch.equal(implementation.embedding(ids, implementation.pack_linear(weight)), weight[ids])


def test_embedding() -> None:
    table, ids = rows(9, 5), torch.tensor([8, 0, 3, 3], dtype=torch.int32)
    assert torch.equal(OPS.embedding(ids, table), torch.stack([table[int(i)] for i in ids]))
    assert OPS.embedding(torch.zeros(0, dtype=torch.int64), table).shape == (0, 5)


def test_only_devices_with_kernels_are_served() -> None:
    with pytest.raises(ValueError, match="meta"):
        ops(torch.device("meta"))
