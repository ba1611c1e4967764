"""With `--batch-invariant`, the bits of a row depend on that row and its context alone.

Interpreted, this proves the structure: which tiles, which segments, which order. How tensor cores round, only a GPU
shows.
"""

import math
import random
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from kernels.batch_rows import BatchRows
from kernels.decoder_layers import Expert, Projection
from kernels.gpu import linear as gpu_linear
from kernels.load import gpu
from kernels.reference import elementwise
from kernels.reference.linear import linear
from tests.gpu_kernels.test_gpu_attention import make_case
from tests.kernels.tolerance import assert_near
from tests.models.family_variants import qwen3_moe
from tests.models.tiny_models import Forward, llama, save

OPS = gpu(batch_invariant=True)
DTYPES = [torch.float32, torch.float16]
COUNTS = [1, 2, 15, 16, 17, 63, 64, 65, 128]
ROWS = 131


def rows(device: torch.device, width: int, dtype: torch.dtype, *, seed: int = 0) -> Tensor:
    return torch.randn(ROWS, width, generator=torch.Generator().manual_seed(seed)).to(device, dtype)


def assert_invariant(
    operation: Callable[[Tensor], Tensor], device: torch.device, counts: Sequence[int] = (1, 17, 65)
) -> None:
    """`operation` takes indices of rows. Their bits must not depend on how many there are, which, or their order."""
    chooser = random.Random(0)
    whole = operation(torch.arange(ROWS, device=device))
    for count in counts:
        index = torch.tensor(chooser.sample(range(ROWS), count), device=device)
        assert torch.equal(operation(index), whole[index]), index


# the product


@pytest.fixture
def _short_segments(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let small matrices have several segments."""
    monkeypatch.setattr(gpu_linear, "SEGMENT", 64)


@pytest.fixture(params=["one program", "many programs"])
def _split(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Let one program compute all segments of a tile, or one each, whatever the number of rows."""
    monkeypatch.setattr(gpu_linear, "should_split", lambda *_: request.param == "many programs")


@pytest.mark.usefixtures("_split", "_short_segments")
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("outputs", "inputs", "biased"), [(131, 201, True), (70, 256, False), (16, 9, True)])
def test_linear(device: torch.device, outputs: int, inputs: int, biased: bool, dtype: torch.dtype) -> None:
    """Widths that fill no tile, in one segment or several; rows with a stride, and no rows."""
    x = rows(device, inputs + 3, dtype)[:, 3:]
    weight = rows(device, inputs, dtype, seed=1)[:outputs] / math.sqrt(inputs)
    bias = rows(device, 2 * outputs, dtype, seed=2)[0, ::2] if biased else None
    packed = OPS.pack_linear(weight)
    expected = x.double() @ weight.double().T
    logits = OPS.logits(x, packed)
    assert logits.dtype == torch.float32
    assert_near(logits, expected, torch.float32, inputs)
    y = OPS.linear(x, packed, bias)
    assert y.dtype == dtype
    assert_near(y, expected if bias is None else expected + bias.double(), dtype, inputs)
    assert OPS.linear(x[:0], packed, bias).shape == (0, outputs)


@pytest.mark.usefixtures("_split", "_short_segments")
@pytest.mark.parametrize("dtype", DTYPES)
def test_a_row_of_a_product_depends_on_it_alone(device: torch.device, dtype: torch.dtype) -> None:
    x, weight = rows(device, 201, dtype), rows(device, 201, dtype, seed=1)[:67]
    assert_invariant(lambda index: OPS.logits(x[index], weight), device, COUNTS)  # unlike float16, they hide no bit
    assert_invariant(lambda index: OPS.linear(x[index], weight, weight[:, 0]), device)
    whole = OPS.logits(x, weight)
    neighbours = torch.full_like(x, math.nan)
    neighbours[[3, 70]] = x[[3, 70]]
    assert torch.equal(OPS.logits(neighbours, weight)[[3, 70]], whole[[3, 70]])
    assert torch.equal(OPS.logits(x[5:9], weight), whole[5:9])  # a view that begins at another address


@pytest.mark.usefixtures("_short_segments")
@pytest.mark.parametrize("dtype", DTYPES)
def test_how_many_programs_share_the_segments_changes_no_bit(
    device: torch.device, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    x, weight, bias = rows(device, 400, dtype), rows(device, 400, dtype, seed=1)[:40], rows(device, 40, dtype)[0]
    results = []
    for split in (True, False):
        monkeypatch.setattr(gpu_linear, "should_split", lambda *_, split=split: split)
        results.append((OPS.linear(x, weight, bias), OPS.logits(x, weight)))
    assert torch.equal(results[0][0], results[1][0])
    assert torch.equal(results[0][1], results[1][1])


@pytest.mark.parametrize(
    ("outputs", "inputs", "expected"),
    [
        (6144, 4096, (832, 5)),  # 48 tiles
        (4096, 4096, (512, 8)),
        (28672, 4096, (4096, 1)),
        (4096, 14336, (1792, 8)),
        (128256, 4096, (4096, 1)),
        (8, 4096, (512, 8)),  # a segment has 512 inputs at least
        (8, 60, (64, 1)),
    ],
)
def test_segments_are_chosen_by_the_shape(outputs: int, inputs: int, expected: tuple[int, int]) -> None:
    assert gpu_linear.choose_segments(outputs, inputs, gpu_linear._TILE) == expected


def test_segments_are_split_while_processors_are_idle() -> None:
    assert [gpu_linear.should_split(tiles, 132) for tiles in (1, 66, 67, 1000)] == [True, True, False, False]


def test_a_weight_that_does_not_fit_is_refused(device: torch.device) -> None:
    x = torch.zeros(2, 8, device=device)
    for weight in (torch.zeros(3, 9), torch.zeros(3, 8, dtype=torch.float16), torch.zeros(8, 3).T):
        with pytest.raises(ValueError, match="do not fit a weight"):
            OPS.linear(x, weight.to(device), None)
    assert OPS.linear(x, OPS.pack_linear(torch.zeros(8, 3, device=device).T), None).shape == (2, 3)


# the other operations


@pytest.mark.parametrize("dtype", DTYPES)
def test_norms_activations_and_routers(device: torch.device, dtype: torch.dtype) -> None:
    x, residual, weights = (rows(device, 120, dtype, seed=seed) for seed in range(3))
    weight, positions = weights[0], torch.arange(ROWS, device=device)
    cos_sin = rows(device, 16, torch.float32, seed=3), rows(device, 16, torch.float32, seed=4)
    layout = OPS.kv_layout(1, 1, 16, 16, dtype)
    cache = layout.views(layout.allocate(9, device))[0]

    def rotate_and_store(index: Tensor) -> Tensor:
        qkv, slots, norms = x[index, :48].view(-1, 3, 16), positions[index], (weight[:16], weight[16:32])
        q = OPS.rotate_and_store(qkv, *cache, slots, positions=slots, cos_sin=cos_sin, norms=norms, eps=1e-5)
        return torch.cat((q, *(part[slots // 16, :, slots % 16] for part in cache)), 1)

    operations: dict[str, Callable[[Tensor], Tensor]] = {
        "rms_norm": lambda index: OPS.rms_norm(x[index], weight, 1e-5),
        "add_rms_norm": lambda index: torch.cat(OPS.add_rms_norm(x[index], residual[index], weight, 1e-5), 1),
        "layer_norm": lambda index: OPS.layer_norm(x[index], weight, weight, 1e-5),
        "add_layer_norm": lambda index: torch.cat(OPS.add_layer_norm(x[index], x[index], weight, weight, 1e-5), 1),
        "silu_and_mul": lambda index: OPS.silu_and_mul(x[index]),
        "gelu_tanh_and_mul": lambda index: OPS.gelu_tanh_and_mul(x[index]),
        "rotate_and_store": rotate_and_store,
        "route": lambda index: torch.cat(OPS.route(x[index], 4, True), 1),
    }
    if device.type == "cuda":  # it is torch's, whose operation on a CPU is another
        operations["gelu_tanh"] = lambda index: OPS.gelu_tanh(x[index])
    for operation in operations.values():
        assert_invariant(operation, device)


@pytest.mark.parametrize("dtype", DTYPES)
def test_experts(device: torch.device, dtype: torch.dtype) -> None:
    """The widths are ones that torch's product takes without `--batch-invariant`."""
    inner = 32

    def projection(outputs: int, inputs: int, seed: int) -> Projection:
        return Projection(rows(device, inputs, dtype, seed=seed)[:outputs] / math.sqrt(inputs), None)

    def expert(seed: int) -> Expert:
        up, down = projection(2 * inner, 64, seed), projection(64, inner, seed + 1)
        return Expert(
            up, down, "silu_and_mul", lambda x: linear(elementwise.silu_and_mul(linear(x, up.weight)), down.weight)
        )

    stacked = OPS.pack_experts((expert(2 * number + 1) for number in range(5)), 5)
    x = rows(device, 64, dtype)
    weights, ids = OPS.route(rows(device, 5, dtype, seed=20), 2, True)
    assert_invariant(lambda index: OPS.mix_experts(x[index], weights[index], ids[index], stacked), device)


@pytest.mark.parametrize(("dtype", "options"), [(torch.float32, {"window": 40}), (torch.float16, {})])
def test_attention_in_other_chunks(device: torch.device, dtype: torch.dtype, options: dict[str, Any]) -> None:
    """Queries of a row at once, and parts of them, some alone and some beside longer and shorter neighbours."""
    case = make_case(device, [(240, 60), (500, 1), (0, 3), (2, 20)], heads=2, kv_heads=1, dtype=dtype)

    def attend(start: int, count: int, neighbours: list[int]) -> Tensor:
        parts = [case.row(0, start, count), *(case.row(index) for index in neighbours)]
        offsets = torch.tensor([0, *(len(part.q) for part in parts)]).cumsum(0)
        plan = OPS.plan_attention(
            BatchRows.of(offsets, torch.cat([part.starts for part in parts]).cpu()).to(device),
            torch.cat([part.tables for part in parts]),
            block_size=16,
            num_kv_heads=1,
        )
        q = torch.cat([part.q for part in parts])
        return OPS.paged_attention(q, case.keys, case.values, plan, scale=0.3, **options)[:count]

    whole = attend(0, 60, [])
    for start, count, neighbours in [(59, 1, []), (59, 1, [1, 3]), (14, 4, [2]), (7, 40, [1])]:
        assert torch.equal(attend(start, count, neighbours), whole[start : start + count]), (start, count, neighbours)


# whole models


@pytest.mark.usefixtures("_short_segments")
@pytest.mark.parametrize("dtype", ["float32", "float16"])
@pytest.mark.parametrize("name", ["llama", "experts"])
def test_logits_of_a_model(device: torch.device, name: str, dtype: str, tmp_path: Path) -> None:
    """Two sequences alone and whole, then in chunks and together. The last matrix of a layer has two segments."""
    model = llama(intermediate_size=201, num_hidden_layers=2)
    if name == "experts":
        model = qwen3_moe(num_hidden_layers=1, norm_topk_prob=True, moe_intermediate_size=32, hidden_size=64)
    forward = Forward(save(model, tmp_path), device=device, operations=OPS, dtype=dtype)
    texts = [[(7 + 31 * i) % 90 for i in range(12)], [(11 + 17 * i) % 90 for i in range(7)]]
    tables = [[9, 2, 30], [5, 1]]
    for slot, (text, table) in enumerate(zip(texts, tables, strict=True)):
        forward.enter(slot, text, table)
    expected = [forward.step((slot, 0, len(text)))[0] for slot, text in enumerate(texts)]
    for steps in (
        [[(1, 0, 7), (0, 0, 12)]],
        [[(1, 0, 6), (0, 0, 5)], [(0, 5, 1), (1, 6, 1)], [(0, 6, 6)]],
    ):
        forward.storage.zero_()
        for step in steps:
            for (slot, start, count), logits in zip(step, forward.step(*step), strict=True):
                assert torch.equal(logits, expected[slot][start : start + count]), (step, slot)
