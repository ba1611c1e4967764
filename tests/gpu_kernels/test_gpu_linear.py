"""Logits, and mixtures of experts, against float64 and against the reference."""

import pytest
import torch
from torch import Tensor

from kernels.decoder_layers import Expert, Projection
from kernels.gpu import experts as gpu
from kernels.gpu.launch import record
from kernels.gpu.linear import logits
from kernels.reference import elementwise
from kernels.reference import experts as reference
from kernels.reference.linear import linear
from tests.kernels.tolerance import assert_near

DTYPES = [torch.float32, torch.float16]


def experts(
    device: torch.device, count: int, width: int, inner: int, dtype: torch.dtype, name: str, *, biased: bool = False
) -> list[Expert]:
    generator = torch.Generator().manual_seed(count * width)

    def projection(outputs: int, inputs: int) -> Projection:
        weight = torch.randn(outputs, inputs, generator=generator) / inputs**0.5
        bias = torch.randn(outputs, generator=generator).to(device, dtype) if biased else None
        return Projection(weight.to(device, dtype), bias)

    def expert(up: Projection, down: Projection) -> Expert:
        activation = getattr(elementwise, name)
        return Expert(up, down, name, lambda x: linear(activation(linear(x, *up)), *down))

    up_width = 2 * inner if name.endswith("and_mul") else inner
    return [expert(projection(up_width, width), projection(width, inner)) for _ in range(count)]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    ("width", "inner", "name"),
    [(32, 16, "silu_and_mul"), (32, 16, "gelu_tanh"), (9, 70, "gelu_tanh_and_mul"), (70, 5, "relu")],
)
@pytest.mark.parametrize("biased", [False, True], ids=["no biases", "biases"])
def test_mix_experts(device: torch.device, width: int, inner: int, name: str, biased: bool, dtype: torch.dtype) -> None:
    """Widths that are no multiples of 16 bytes are computed by a kernel of ours. Expert 2 is used by nobody."""
    blocks = experts(device, 5, width, inner, dtype, name, biased=biased)
    x = torch.randn(7, width, generator=torch.Generator().manual_seed(1)).to(device, dtype)
    topk_ids = torch.tensor([[0, 1], [3, 0], [1, 3], [3, 1], [0, 3], [4, 3], [3, 4]], device=device)
    topk_weights = torch.rand(7, 2, generator=torch.Generator().manual_seed(2)).to(device)
    stacked = gpu.pack_experts(iter(blocks), 5)
    y = gpu.mix_experts(x, topk_weights, topk_ids, stacked)
    assert y.dtype == dtype
    assert_near(y, reference.mix_experts(x, topk_weights, topk_ids, reference.pack_experts(blocks, 5)), dtype, width)
    assert gpu.mix_experts(x[:0], topk_weights[:0], topk_ids[:0], stacked).shape == (0, width)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("sizes", [(0, 17, 0, 3, 16), (0, 0, 0), (1,), (33, 0, 1)])
def test_grouped_linear(device: torch.device, sizes: tuple[int, ...], dtype: torch.dtype) -> None:
    generator = torch.Generator().manual_seed(3)
    x = torch.randn(sum(sizes), 70, generator=generator).to(device, dtype)
    weights = torch.randn(len(sizes), 67, 70, generator=generator).to(device, dtype)
    ends = torch.tensor(sizes).cumsum(0).to(device, torch.int32)
    y = gpu.grouped_linear(x, weights, ends)
    parts = [rows.double() @ weight.double().T for rows, weight in zip(x.split(sizes), weights, strict=True)]
    assert_near(y, torch.cat(parts), dtype, 70)


def test_a_rows_experts_do_not_depend_on_its_neighbours(device: torch.device) -> None:
    stacked = gpu.pack_experts(experts(device, 3, 70, 5, torch.float32, "silu_and_mul", biased=True), 3)
    x = torch.randn(21, 70, generator=torch.Generator().manual_seed(4)).to(device)
    topk_ids, topk_weights = torch.arange(42, device=device).view(21, 2) % 3, torch.ones(21, 2, device=device) / 2

    def mixed(part: Tensor) -> Tensor:
        return gpu.mix_experts(x[part], topk_weights[part], topk_ids[part], stacked)

    whole = mixed(torch.arange(21))
    for part in (torch.tensor([20]), torch.tensor([3, 1]), torch.arange(20, -1, -1)):
        assert torch.equal(mixed(part), whole[part])


@pytest.mark.parametrize("order", [(0, 1), (1, 0)])
def test_biases_of_some_experts_only_are_refused(device: torch.device, order: tuple[int, int]) -> None:
    plain, biased = (experts(device, 1, 4, 4, torch.float32, "relu", biased=biased)[0] for biased in (False, True))
    with pytest.raises(ValueError, match="biases that others lack"):
        gpu.pack_experts([(plain, biased)[index] for index in order], 2)


def test_on_the_meta_device_nothing_waits() -> None:
    """What would wait for a GPU raises there."""
    meta = torch.device("meta")
    for dtype, count in ((torch.bfloat16, 1), (torch.float16, 3)):
        stacked = gpu.pack_experts(experts(meta, 3, 16, 16, dtype, "gelu_tanh", biased=True), 3)
        x, ids = torch.empty(7, 16, dtype=dtype, device=meta), torch.empty(7, 2, dtype=torch.int64, device=meta)
        with record() as launches:
            assert gpu.mix_experts(x, ids.float(), ids, stacked).shape == (7, 16)
        assert len(launches) == count


@pytest.mark.parametrize("dtype", [*DTYPES, torch.bfloat16])
def test_logits(device: torch.device, dtype: torch.dtype) -> None:
    x, weight = (torch.randn(rows, 37, generator=torch.Generator().manual_seed(rows)) for rows in (3, 11))
    x, weight = x.to(device, dtype), weight.to(device, dtype)
    y = logits(x, weight)
    assert y.dtype == torch.float32
    assert_near(y, x.double() @ weight.double().T, dtype, 37)
    assert logits(x.to("meta"), weight.to("meta")).dtype == torch.float32
