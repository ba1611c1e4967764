"""Paged attention against loops over single numbers, on shapes that are odd on purpose."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor

from kernels.batch_rows import BatchRows
from kernels.cpu import extension
from kernels.kv_bias import KVBias
from kernels.layout import KVLayout, flat_slots, has_scales, scales
from kernels.load import ops, reference
from kernels.ops import Ops
from tests.kernels.tolerance import assert_near

CPU = ops(torch.device("cpu"))


@pytest.fixture(params=[CPU, reference()], ids=["cpu", "reference"])
def kernels(request: pytest.FixtureRequest) -> Ops:
    kernels: Ops = request.param
    return kernels


@dataclass
class Case:
    """A cache with sequences in scattered blocks, and a batch of rows over them."""

    ops: Ops
    q: Tensor
    keys: Tensor
    values: Tensor
    offsets: Tensor
    starts: Tensor
    tables: Tensor
    layout: KVLayout

    def run(self, **options: Any) -> Tensor:
        heads = self.keys.shape[1]
        rows = BatchRows.of(self.offsets, self.starts)
        plan = self.ops.plan_attention(rows, self.tables, block_size=self.layout.block_size, num_kv_heads=heads)
        return self.ops.paged_attention(self.q, self.keys, self.values, plan, scale=0.3, **options)


def make_case(
    ops: Ops,
    rows: list[tuple[int, int]],
    *,
    heads: int = 6,
    kv_heads: int = 2,
    dim: int = 10,
    block_size: int = 4,
    dtype: torch.dtype = torch.float32,
    seed: int = 0,
) -> Case:
    """Return a case with `rows` of (start, count). What no row may see is NaN."""
    torch.manual_seed(seed)
    width = max(-(-(start + count) // block_size) for start, count in rows) + 1
    pool = torch.randperm(len(rows) * width).view(len(rows), width)
    layout = ops.kv_layout(1, kv_heads, dim, block_size, dtype)
    keys, values = layout.views(layout.allocate(pool.numel(), torch.device("cpu")))[0]
    float_dtype = torch.float32 if has_scales(dtype) else dtype
    nothing = torch.full((pool.numel() * block_size, kv_heads, dim), math.nan, dtype=float_dtype)
    ops.write_kv(nothing, nothing, keys, values, torch.arange(len(nothing)))
    for row, (start, count) in enumerate(rows):
        new = torch.randn(start + count, 2, kv_heads, dim).to(float_dtype)
        slots = flat_slots(pool, torch.full((start + count,), row), torch.arange(start + count), block_size)
        ops.write_kv(new[:, 0], new[:, 1], keys, values, slots)
    counts = torch.tensor([count for _, count in rows])
    return Case(
        ops,
        torch.randn(int(counts.sum()), heads, dim).to(float_dtype),
        keys,
        values,
        torch.cat((torch.zeros(1, dtype=torch.int64), counts.cumsum(0))),
        torch.tensor([start for start, _ in rows]),
        pool.int(),
        layout,
    )


def read(case: Case) -> tuple[Tensor, Tensor]:
    """Return the numbers that a case's keys and values stand for, (block, kv head, slot, dim)."""
    keys, values = case.layout.vectors(case.keys, case.values)
    if has_scales(keys.dtype):
        return keys.float() * scales(case.keys)[..., None], values.float() * scales(case.values)[..., None]
    return keys, values


def by_hand(
    case: Case,
    *,
    window: int = 0,
    softcap: float = 0.0,
    only: Sequence[int] | None = None,
    vectors: tuple[Tensor, Tensor] | None = None,
) -> Tensor:
    """Return the attention in float64, over `vectors`, or else the keys and values of the cache."""
    out = torch.zeros(case.q.shape, dtype=torch.float64)
    shared = case.q.shape[1] // case.keys.shape[1]
    keys, values = vectors or read(case)
    for row in range(len(case.starts)):
        for token in range(case.offsets[row], case.offsets[row + 1]):
            if only is not None and token not in only:
                continue
            position = int(case.starts[row] + token - case.offsets[row])
            first = max(0, position - window + 1) if window else 0
            size = case.layout.block_size
            places = [(case.tables[row, j // size], j % size) for j in range(first, position + 1)]
            for head in range(case.q.shape[1]):
                kv = head // shared
                scores = [0.3 * case.q[token, head].double() @ keys[b, kv, o].double() for b, o in places]
                if softcap:
                    scores = [softcap * torch.tanh(score / softcap) for score in scores]
                weights = torch.softmax(torch.stack(scores), 0)
                for weight, (block, offset) in zip(weights, places, strict=True):
                    out[token, head] += weight * values[block, kv, offset].double()
    return out


RAGGED = {
    "one token": [(0, 1)],
    "one prompt": [(0, 11)],
    "decodes of many lengths": [(0, 1), (16, 1), (3, 1), (40, 1), (7, 1), (15, 1)],
    "prompts, pieces of prompts and decodes": [(5, 1), (0, 7), (9, 1), (4, 7), (13, 3), (0, 1)],
    "same counts, whole batch": [(3, 2), (8, 2), (1, 2)],
}


@pytest.mark.parametrize("rows", RAGGED.values(), ids=RAGGED.keys())
@pytest.mark.parametrize("options", [{}, {"window": 3}, {"softcap": 1.5}, {"window": 5, "softcap": 2.0}], ids=str)
def test_agrees_with_loops(kernels: Ops, rows: list[tuple[int, int]], options: dict[str, float]) -> None:
    case = make_case(kernels, rows)
    assert_near(case.run(**options), by_hand(case, **options), torch.float32, 40)


@pytest.mark.parametrize(
    ("heads", "kv_heads", "dim", "block_size"), [(1, 1, 7, 1), (5, 5, 8, 2), (9, 3, 16, 16), (8, 1, 20, 32)]
)
def test_shapes(kernels: Ops, heads: int, kv_heads: int, dim: int, block_size: int) -> None:
    case = make_case(kernels, [(2, 1), (0, 5)], heads=heads, kv_heads=kv_heads, dim=dim, block_size=block_size)
    assert_near(case.run(), by_hand(case), torch.float32, 40)


@pytest.mark.parametrize(
    ("heads", "kv_heads", "dim", "block_size"),
    [(1, 1, 7, 1), (6, 2, 10, 4), (4, 4, 64, 8), (7, 1, 33, 2), (9, 3, 64, 16), (8, 1, 20, 32)],
)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision(kernels: Ops, dtype: torch.dtype, heads: int, kv_heads: int, dim: int, block_size: int) -> None:
    rows = [(2, 1), (0, 5), (30, 1), (255, 2)]
    case = make_case(kernels, rows, dtype=dtype, heads=heads, kv_heads=kv_heads, dim=dim, block_size=block_size)
    out = case.run()
    assert out.dtype == dtype
    assert_near(out, by_hand(case), dtype)
    assert_near(case.run(softcap=2.0), by_hand(case, softcap=2.0), dtype)


@pytest.mark.parametrize(
    ("heads", "kv_heads", "dim", "block_size"),
    [(1, 1, 7, 1), (6, 3, 10, 4), (9, 3, 64, 16), (8, 1, 20, 32), (5, 1, 33, 2), (4, 4, 128, 8)],
)
def test_eight_bits(kernels: Ops, heads: int, kv_heads: int, dim: int, block_size: int) -> None:
    rows = [(2, 1), (0, 35), (300, 1)]
    shape = {"heads": heads, "kv_heads": kv_heads, "dim": dim, "block_size": block_size}
    case = make_case(kernels, rows, dtype=torch.int8, **shape)
    out = case.run()
    expected = by_hand(case)
    assert (out - expected).norm() < 5e-4 * expected.norm()  # the CPU's kernels round queries and weights to 15 bits
    exact = make_case(kernels, rows, **shape).run()
    assert 0 < (out - exact).norm() < 0.02 * exact.norm()


def test_eight_bits_of_a_vector_depend_on_it_alone(kernels: Ops) -> None:
    layout = kernels.kv_layout(num_layers=1, num_kv_heads=2, head_dim=10, block_size=4, dtype=torch.int8)
    storage = layout.allocate(3, torch.device("cpu"))
    keys, values = layout.views(storage)[0]
    new = torch.randn(5, 2, 10) * torch.tensor([1e-20, 1.0, 1e20, 0.0, 1.0])[:, None, None]
    new[4, 1, 3] = math.inf
    slots = torch.tensor([3, 4, 0, 11, 6])
    kernels.write_kv(new, -new, keys, values, slots)
    kernels.copy_blocks(storage, torch.tensor([1]), torch.tensor([0]))
    for cache, quants, sign in zip((keys, values), layout.vectors(keys, values), (1, -1), strict=True):
        largest = new.abs().amax(-1)
        expected = (sign * new / largest[..., None] * 127).round().nan_to_num().to(torch.int8)
        for token in (1, 4):
            for block in (0, 1):
                assert torch.equal(quants[block, 0, slots[token] % 4], expected[token, 0])
                assert scales(cache)[block, 0, slots[token] % 4] == largest[token, 0] / 127
        assert scales(cache)[1, 1, 2].isnan()
        assert torch.equal(quants[2, :, 3], torch.zeros(2, 10, dtype=torch.int8))
        assert scales(cache)[2, :, 3].tolist() == [0, 0]
    assert storage[0, 1, 2].count_nonzero() == 0


def test_eight_bits_do_not_hide_what_is_not_finite(kernels: Ops) -> None:
    """Quants are integers, which have no NaN: scales must have it, of keys, values and queries."""
    case = make_case(kernels, [(20, 3), (0, 3), (299, 1)], dtype=torch.int8)
    case.q[5] = math.inf
    scales(case.values)[case.tables[0, 1], 0, 2] = math.nan
    scales(case.keys)[case.tables[2, 0], 1, 2] = math.nan
    broken = case.run().isnan()
    expected = torch.zeros(7, 6, 10, dtype=torch.bool)
    expected[:3, :3] = expected[6, 3:] = expected[5] = True
    assert torch.equal(broken, expected)


@pytest.mark.parametrize("threads", [1, 2])
@pytest.mark.parametrize("position", [255, 299])
def test_a_key_that_is_not_finite_shows_however_segments_are_shared(kernels: Ops, threads: int, position: int) -> None:
    """One segment of two has it in its last lane, the other one has finite results."""
    case = make_case(kernels, [(299, 1)], dtype=torch.int8)
    block, slot = divmod(position, case.layout.block_size)
    scales(case.keys)[case.tables[0, block], :, slot] = math.nan
    before = torch.get_num_threads()
    try:
        torch.set_num_threads(threads)
        assert case.run().isnan().all()
    finally:
        torch.set_num_threads(before)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16, torch.int8])
@pytest.mark.parametrize("block_size", [1, 2, 8, 16, 32])
def test_vectors_are_read_as_they_were_written(kernels: Ops, dtype: torch.dtype, block_size: int) -> None:
    layout = kernels.kv_layout(num_layers=2, num_kv_heads=3, head_dim=21, block_size=block_size, dtype=dtype)
    storage = layout.allocate(64 // block_size, torch.device("cpu"))
    keys, values = layout.views(storage)[1]
    new = torch.randint(-127, 128, (2, 64, 3, 21)).float()
    new[..., 0] = 127  # so that the scale is 1
    slots = torch.randperm(64)
    stored = new if has_scales(dtype) else new.to(dtype)
    kernels.write_kv(stored[0], stored[1], keys, values, slots)
    for got, expected in zip(layout.vectors(keys, values), new, strict=True):
        assert torch.equal(got.transpose(1, 2).flatten(0, 1)[slots].float(), expected)
    assert storage[0].count_nonzero() == 0


def test_memory_of_groups() -> None:
    """csrc/kv_cache.h has the same layout."""
    layout = KVLayout(1, 1, 6, 8, torch.int8, grouped=True, lanes=8)
    keys, values = layout.views(layout.allocate(1, torch.device("cpu")))[0]
    for view in (keys, values):
        view.copy_(torch.arange(64, dtype=torch.int8).view(view.shape))
    got_keys, got_values = layout.vectors(keys, values)
    assert got_keys.shape == got_values.shape == (1, 1, 8, 6)
    assert got_keys[0, 0, 3].tolist() == [number - 128 for number in (12, 13, 14, 15, 44, 45)]
    assert got_values[0, 0, 5].tolist() == [33, 37, 41, 45, 49, 53]


def test_float8_of_the_reference() -> None:
    """The GPU's kernels are compared with it. Of the CPU's types, int8 is as small."""
    rows = [(2, 1), (0, 35), (300, 1)]
    case = make_case(reference(), rows, dtype=torch.float8_e4m3fn)
    out = case.run()
    assert_near(out, by_hand(case), torch.float32, 300)
    exact = make_case(reference(), rows).run()
    assert 0 < (out - exact).norm() < 0.05 * exact.norm()


def test_float8_of_a_vector_depends_on_it_alone() -> None:
    layout = KVLayout(num_layers=1, num_kv_heads=1, head_dim=10, block_size=4, dtype=torch.float8_e4m3fn)
    keys, values = layout.views(layout.allocate(2, torch.device("cpu")))[0]
    new = torch.tensor([448.0, -1.0, 17.0, 19.0, 27.0, -500 / 1024, 3 / 1024, 1 / 1024, -1e-9, 0.0]).expand(4, 1, 10)
    new = new * torch.tensor([1.0, 2**-30, 2**66, 1.0])[:, None, None]
    new[3, 0, 4] = math.nan
    reference().write_kv(new, -new, keys, values, torch.tensor([7, 0, 2, 5]))
    rounded = torch.tensor([448.0, -1.0, 16.0, 20.0, 28.0, -0.5, 2 / 512, 0.0, -0.0, 0.0])
    for cache, sign in ((keys, 1), (values, -1)):
        stored = cache.transpose(1, 2).flatten(0, 1)[:, 0].float()
        for slot, scale in ((7, 1.0), (0, 2.0**-30), (2, 2.0**66)):
            assert torch.equal(stored[slot], sign * rounded)
            assert scales(cache)[slot // 4, 0, slot % 4] == scale
        assert scales(cache)[1, 0, 1].isnan()
        assert stored[5].count_nonzero() == 0


def rotated(vector: Tensor, position: int, frequencies: Tensor) -> Tensor:
    """Return `vector` (D,) with its first dimensions rotated, pair by pair, in float64."""
    out, half = vector.double().clone(), len(frequencies)
    for i, frequency in enumerate(frequencies.double().tolist()):
        a, b = float(vector[i]), float(vector[half + i])
        cos, sin = math.cos(position * frequency), math.sin(position * frequency)
        out[i], out[half + i] = a * cos - b * sin, b * cos + a * sin
    return out


@pytest.mark.parametrize("rows", [*RAGGED.values(), [(250, 9), (300, 1)]], ids=[*RAGGED, "segments"])
@pytest.mark.parametrize("pairs", [5, 3, 0], ids=["whole heads rotated", "parts of heads", "not rotated"])
@pytest.mark.parametrize("options", [{}, {"window": 5}, {"softcap": 2.0}], ids=str)
def test_biases_that_the_cache_lacks(
    kernels: Ops, rows: list[tuple[int, int]], pairs: int, options: dict[str, float]
) -> None:
    """KV8-01: the output is that of keys and values with biases. A softcap needs all of a head to be rotated."""
    if pairs < 5 and "softcap" in options:
        pytest.skip("never asked for")
    case = make_case(kernels, rows)
    bias = KVBias(torch.randn(2, 10) * 3, torch.randn(2, 10) * 3)
    assert bias.keys is not None
    assert bias.values is not None
    frequencies = torch.rand(pairs)
    table = torch.outer(torch.arange(310.0), torch.cat((frequencies, frequencies)))
    angles = kernels.pack_angles(table.cos(), table.sin()) if pairs else None
    out = case.run(bias=bias, angles=angles, **options)
    keys, values = (vectors.clone() for vectors in read(case))
    for row, (start, count) in enumerate(rows):
        for position in range(start + count):
            size = case.layout.block_size
            block, offset = case.tables[row, position // size], position % size
            for head in range(2):
                keys[block, head, offset] += rotated(bias.keys[head], position, frequencies).float()
                values[block, head, offset] += bias.values[head]
    assert_near(out, by_hand(case, vectors=(keys, values), **options), torch.float32, 300)


@pytest.mark.skipif(not extension.load(), reason="the kernels are not compiled here")
def test_positions_without_angles_are_an_error() -> None:
    angles = CPU.pack_angles(torch.ones(64, 10), torch.ones(64, 10))
    with pytest.raises(RuntimeError, match="positions without angles"):
        make_case(CPU, [(64, 1)]).run(bias=KVBias(torch.ones(2, 10)), angles=angles)


def test_queries_of_any_strides(kernels: Ops) -> None:
    case = make_case(kernels, [(2, 1), (0, 5)])
    expected = case.run()
    wide = torch.zeros(case.q.shape[0], case.q.shape[1] + 3, case.q.shape[2])
    wide[:, 1:-2] = case.q
    case.q = wide[:, 1:-2]
    assert not case.q.is_contiguous()
    assert torch.equal(case.run(), expected)


def test_inputs_are_left_alone(kernels: Ops) -> None:
    case = make_case(kernels, [(2, 1), (0, 5), (9, 1)])
    before = case.q.clone(), case.keys.clone(), case.values.clone()
    case.run(window=2, softcap=3.0)
    for was, now in zip(before, (case.q, case.keys, case.values), strict=True):
        assert torch.equal(was.nan_to_num(7.0), now.nan_to_num(7.0))


def test_a_plan_serves_layers_with_different_windows(kernels: Ops) -> None:
    case = make_case(kernels, [(6, 1), (0, 5)])
    plan = kernels.plan_attention(BatchRows.of(case.offsets, case.starts), case.tables, block_size=4, num_kv_heads=2)
    for window in (0, 2, 0, 3):
        out = kernels.paged_attention(case.q, case.keys, case.values, plan, scale=0.3, window=window)
        assert_near(out, by_hand(case, window=window), torch.float32, 10)


def test_rows_need_not_be_in_the_order_of_their_slots(kernels: Ops) -> None:
    case = make_case(kernels, [(3, 2), (8, 2), (1, 2), (5, 2)])
    expected = by_hand(case)
    order = torch.tensor([2, 0, 3, 1])  # row r is that of the slot order[r]
    tables = torch.empty_like(case.tables)
    tables[order] = case.tables
    rows = BatchRows.of(case.offsets, case.starts, order)
    plan = kernels.plan_attention(rows, tables, block_size=4, num_kv_heads=2)
    assert_near(kernels.paged_attention(case.q, case.keys, case.values, plan, scale=0.3), expected, torch.float32, 10)


def test_the_reference_gathers_rows_of_similar_length_together() -> None:
    kernels = reference()
    starts = [0, 1, 2, 400, 410, 420]
    case = make_case(kernels, [(start, 1) for start in starts])
    plan = kernels.plan_attention(BatchRows.of(case.offsets, case.starts), case.tables, block_size=4, num_kv_heads=2)
    assert [group.length for group in plan.groups] == [4, 424]


def test_the_reference_cuts_long_rows() -> None:
    kernels = reference()
    case = make_case(kernels, [(3, 300), (0, 1), (1, 600)], heads=2, kv_heads=1, dim=8, block_size=16)
    plan = kernels.plan_attention(BatchRows.of(case.offsets, case.starts), case.tables, block_size=16, num_kv_heads=1)
    assert sorted(group.size for group in plan.groups) == [1, 44, 88, 256, 256]
    out = case.run()
    assert_near(out[:300:37], by_hand(case, only=range(0, 300, 37))[:300:37], torch.float32, 600)
    assert_near(out[300], by_hand(case, only=[300])[300], torch.float32, 600)
    assert_near(out[-1], by_hand(case, only=[900])[-1], torch.float32, 600)


def test_write_then_read(kernels: Ops) -> None:
    layout = kernels.kv_layout(num_layers=2, num_kv_heads=3, head_dim=5, block_size=4, dtype=torch.float32)
    storage = layout.allocate(6, torch.device("cpu"))
    tables = torch.tensor([[4, 1, 0], [2, 5, 3]], dtype=torch.int32)
    rows, positions = torch.tensor([0, 0, 1, 1, 1]), torch.tensor([3, 4, 0, 7, 11])
    slots = flat_slots(tables, rows, positions, layout.block_size)
    assert slots.tolist() == [4 * 4 + 3, 1 * 4, 2 * 4, 5 * 4 + 3, 3 * 4 + 3]
    fused = torch.randn(5, 6, 5)
    keys, values = layout.views(storage)[1]
    kernels.write_kv(fused[:, 3:], fused[:, :3], keys, values, slots)
    stored_keys, stored_values = layout.vectors(keys, values)
    for token, slot in enumerate(slots.tolist()):
        assert torch.equal(stored_keys[slot // 4, :, slot % 4], fused[token, 3:])
        assert torch.equal(stored_values[slot // 4, :, slot % 4], fused[token, :3])
    assert storage[0].count_nonzero() == 0
    assert storage[1].count_nonzero() == fused.numel()


def test_copies_reach_all_layers_and_nothing_else(kernels: Ops) -> None:
    layout = kernels.kv_layout(num_layers=3, num_kv_heads=2, head_dim=4, block_size=2, dtype=torch.float32)
    storage = layout.allocate(5, torch.device("cpu")).normal_()
    before = storage.clone()
    kernels.copy_blocks(storage, torch.tensor([0, 3]), torch.tensor([4, 1]))
    assert torch.equal(storage[:, :, [4, 1]], before[:, :, [0, 3]])
    assert torch.equal(storage[:, :, [0, 2, 3]], before[:, :, [0, 2, 3]])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.int8])
def test_swapped_blocks_come_back_with_their_scales(kernels: Ops, dtype: torch.dtype) -> None:
    layout = kernels.kv_layout(num_layers=3, num_kv_heads=2, head_dim=10, block_size=4, dtype=dtype)
    storage, host = layout.allocate(5, torch.device("cpu")), layout.allocate_host(3)
    assert host.nbytes == 3 * layout.bytes_per_block
    storage.view(torch.uint8).random_()
    before = storage.clone()
    kernels.swap_out(storage, host, [(4, 2), (1, 0)])
    assert torch.equal(storage.view(torch.uint8), before.view(torch.uint8))
    kernels.swap_in(storage, host, [(2, 0), (0, 2), (2, 3)])
    expected = before.clone()
    expected[:, :, [0, 2, 3]] = before[:, :, [4, 1, 4]]
    assert torch.equal(storage.view(torch.uint8), expected.view(torch.uint8))


@pytest.mark.parametrize(("dtype", "size"), [(torch.bfloat16, 2), (torch.int8, 1), (torch.float8_e4m3fn, 1)])
@pytest.mark.parametrize("lanes", [1, 16])
def test_sizes_of_the_layout(lanes: int, dtype: torch.dtype, size: int) -> None:
    layout = KVLayout(num_layers=3, num_kv_heads=2, head_dim=4, block_size=16, dtype=dtype, lanes=lanes)
    storage = layout.allocate(7, torch.device("cpu"))
    assert storage.nbytes == 7 * layout.bytes_per_block == 7 * 16 * layout.bytes_per_token
    assert layout.bytes_per_token == 3 * 2 * 2 * (max(4, lanes) * size + (4 if size == 1 else 0))


@pytest.mark.parametrize("rows", [[(250, 9), (700, 1), (511, 2), (255, 1)], [(800, 1)]], ids=["many", "one"])
def test_long_contexts_are_taken_in_segments(kernels: Ops, rows: list[tuple[int, int]]) -> None:
    """Threads share the segments of a context if there are few rows, and merge them."""
    case = make_case(kernels, rows, heads=4, kv_heads=2, dim=8, block_size=16)
    assert_near(case.run(), by_hand(case), torch.float32, 700)
    assert_near(case.run(window=300), by_hand(case, window=300), torch.float32, 700)


@pytest.mark.skipif(not extension.load(), reason="the kernels are not compiled here")
def test_a_block_size_that_tiles_cannot_follow_is_an_error() -> None:
    with pytest.raises(RuntimeError, match="blocks of 3"):
        make_case(CPU, [(2, 1)], block_size=3).run()
