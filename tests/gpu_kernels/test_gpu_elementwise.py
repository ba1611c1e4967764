"""Norms and activations against float64 and against the reference."""

import pytest
import torch
from torch import Tensor

from kernels.gpu import elementwise as gpu
from kernels.reference import elementwise as reference
from tests.kernels.tolerance import assert_near

DTYPES = [torch.float32, torch.float16]
SHAPES = [(1, 1), (3, 7), (5, 130), (2, 1100)]


def rows(device: torch.device, count: int, width: int, dtype: torch.dtype = torch.float32, seed: int = 0) -> Tensor:
    """Return a view that is not contiguous, between cells of NaN."""
    generator = torch.Generator().manual_seed(count * width + seed)
    cells = torch.full((count, width + 3), torch.nan)
    cells[:, 1:-2] = torch.randn(count, width, generator=generator)
    return cells.to(device, dtype)[:, 1:-2]


def vector(device: torch.device, width: int, dtype: torch.dtype, seed: int = 1) -> Tensor:
    return rows(device, 1, width, dtype, seed)[0]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("count", "width"), SHAPES)
def test_rms_norm(device: torch.device, count: int, width: int, dtype: torch.dtype) -> None:
    x, weight = rows(device, count, width, dtype), vector(device, width, dtype)
    wide = x.double()
    expected = wide / (wide.square().mean(-1, keepdim=True) + 1e-5).sqrt() * weight.double()
    y = gpu.rms_norm(x, weight, 1e-5)
    assert y.dtype == dtype
    assert_near(y, expected, dtype)
    assert_near(y, reference.rms_norm(x, weight, 1e-5), dtype)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("count", "width"), SHAPES)
@pytest.mark.parametrize("has_bias", [False, True])
def test_layer_norm(device: torch.device, count: int, width: int, dtype: torch.dtype, has_bias: bool) -> None:
    x, weight = rows(device, count, width, dtype), vector(device, width, dtype)
    bias = vector(device, width, dtype, seed=2) if has_bias else None
    wide = x.double()
    centred = wide - wide.mean(-1, keepdim=True)
    expected = centred / (centred.square().mean(-1, keepdim=True) + 1e-5).sqrt() * weight.double()
    y = gpu.layer_norm(x, weight, bias, 1e-5)
    assert y.dtype == dtype
    assert_near(y, expected if bias is None else expected + bias.double(), dtype)


@pytest.mark.parametrize("dtype", DTYPES)
def test_norms_of_sums_give_the_sum_too(device: torch.device, dtype: torch.dtype) -> None:
    x, residual = rows(device, 4, 33, dtype), rows(device, 4, 33, dtype).flip(0)
    weight, before = vector(device, 33, dtype), residual.clone()
    normed, total = gpu.add_rms_norm(x, residual, weight, 1e-5)
    assert torch.equal(total, x + residual)
    assert torch.equal(normed, gpu.rms_norm(x + residual, weight, 1e-5))
    normed, total = gpu.add_layer_norm(x, residual, weight, weight, 1e-5)
    assert torch.equal(total, x + residual)
    assert torch.equal(normed, gpu.layer_norm(x + residual, weight, weight, 1e-5))
    assert torch.equal(residual, before)


def test_norms_take_any_shape_strides_and_no_rows(device: torch.device) -> None:
    x, weight = rows(device, 12, 5), vector(device, 5, torch.float32)
    expected = gpu.rms_norm(x, weight, 1e-5)
    assert torch.equal(gpu.rms_norm(x.unflatten(0, (3, 4)), weight, 1e-5), expected.view(3, 4, 5))
    assert torch.equal(gpu.rms_norm(x.T.contiguous().T, weight, 1e-5), expected)
    assert torch.equal(gpu.rms_norm(x.expand(2, 12, 5), weight, 1e-5), expected.expand(2, 12, 5))
    assert gpu.rms_norm(x[:0], weight, 1e-5).shape == (0, 5)


def test_a_norms_weight_may_be_wider_than_its_input(device: torch.device) -> None:
    x, weight = rows(device, 5, 33, torch.float16), 1 + vector(device, 33, torch.float32) * 0.01
    expected = x.double() / (x.double().square().mean(-1, keepdim=True) + 1e-5).sqrt() * weight.double()
    assert torch.equal(gpu.rms_norm(x, weight, 1e-5), expected.half())


@pytest.mark.parametrize("width", [64, 130])
def test_a_rows_norm_depends_on_the_row_alone(device: torch.device, width: int) -> None:
    x, weight = rows(device, 9, width), vector(device, width, torch.float32)
    whole = gpu.rms_norm(x, weight, 1e-5), gpu.layer_norm(x, weight, weight, 1e-5)
    for part in ([8], [3, 1], list(range(8, -1, -1))):
        alone = gpu.rms_norm(x[part], weight, 1e-5), gpu.layer_norm(x[part], weight, weight, 1e-5)
        assert torch.equal(alone[0], whole[0][part])
        assert torch.equal(alone[1], whole[1][part])


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("width", [1, 7, 1030])
def test_activations(device: torch.device, width: int, dtype: torch.dtype) -> None:
    x = rows(device, 3, 2 * width, dtype) * 3
    x[0, 0], x[1, 0] = -200.0, 200.0
    before, gate, up = x.clone(), x[:, :width].double(), x[:, width:].double()
    assert_near(gpu.silu_and_mul(x), gate / (1 + (-gate).exp()) * up, dtype)
    assert_near(gpu.gelu_tanh_and_mul(x), reference.gelu_tanh(gate) * up, dtype)
    assert torch.equal(x, before)


def test_tensors_that_do_not_fit_are_errors(device: torch.device) -> None:
    x = rows(device, 2, 6)
    with pytest.raises(ValueError, match="does not fit"):
        gpu.rms_norm(x, torch.ones(5, device=device), 1e-5)
    with pytest.raises(ValueError, match="cannot add"):
        gpu.add_rms_norm(x, x[:1], torch.ones(6, device=device), 1e-5)
    with pytest.raises(ValueError, match="two halves"):
        gpu.silu_and_mul(x[:, :5])
    with pytest.raises(ValueError, match="wider"):
        gpu.rms_norm(torch.empty(1, 40000, device=device), torch.empty(40000, device=device), 1e-5)
