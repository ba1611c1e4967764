"""The GPU's paged attention against the reference, on shapes that are odd on purpose."""

import math
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor

from kernels.batch_rows import BatchRows
from kernels.gpu import attention
from kernels.gpu.launch import record
from kernels.kv_bias import KVBias
from kernels.layout import KVLayout, flat_slots, has_scales, scales
from kernels.reference import ops as reference
from tests.kernels.tolerance import assert_near

Rows = list[tuple[int, int]]


class Case(NamedTuple):
    """A cache with sequences in scattered blocks, and a batch of rows over them."""

    q: Tensor
    keys: Tensor
    values: Tensor
    offsets: Tensor
    starts: Tensor
    tables: Tensor

    @property
    def rows(self) -> BatchRows:
        return BatchRows.of(self.offsets.cpu(), self.starts.cpu())

    def run(self, *, batch_invariant: bool = False, **options: Any) -> Tensor:
        plan = attention.plan_attention(
            self.rows,
            self.tables,
            block_size=self.keys.shape[2],
            num_kv_heads=self.keys.shape[1],
            batch_invariant=batch_invariant,
        )
        return attention.paged_attention(self.q, self.keys, self.values, plan, scale=0.3, **options)

    def expected(self, **options: Any) -> Tensor:
        """Return the reference's result, in float32."""
        plan = reference.plan_attention(
            self.rows.to(self.tables.device),
            self.tables.clamp(min=0),
            block_size=self.keys.shape[2],
            num_kv_heads=self.keys.shape[1],
        )
        return reference.paged_attention(self.q.float(), self.keys, self.values, plan, scale=0.3, **options)

    def row(self, index: int, first: int = 0, count: int | None = None) -> "Case":
        """Return the batch of one row alone, or of some of its queries."""
        begin = int(self.offsets[index]) + first
        count = int(self.offsets[index + 1]) - begin if count is None else count
        return self._replace(
            q=self.q[begin : begin + count],
            offsets=torch.tensor([0, count]),
            starts=self.starts[index : index + 1] + first,
            tables=self.tables[index : index + 1],
        )


def make_case(
    device: torch.device,
    rows: Rows,
    *,
    heads: int = 6,
    kv_heads: int = 2,
    dim: int = 64,
    block_size: int = 16,
    dtype: torch.dtype = torch.float32,
    cache_dtype: torch.dtype | None = None,
    tables: torch.dtype = torch.int32,
) -> Case:
    """Return a case with `rows` of (start, count) over blocks in random order.

    What no row may see is NaN, and entries of tables after a row's last block are -1.
    """
    torch.manual_seed(sum(start * 7 + count for start, count in rows))
    width = max(-(-(start + count) // block_size) for start, count in rows) + 1
    pool = torch.randperm(len(rows) * width).view(len(rows), width)
    layout = KVLayout(1, kv_heads, dim, block_size, cache_dtype or dtype)
    keys, values = layout.views(layout.allocate(pool.numel(), torch.device("cpu")))[0]
    for cache in (keys, values):
        (scales(cache) if has_scales(cache.dtype) else cache).fill_(math.nan)
    for row, (start, count) in enumerate(rows):
        vectors = torch.randn(start + count, 2, kv_heads, dim).to(dtype)
        slots = flat_slots(pool, torch.full((start + count,), row), torch.arange(start + count), block_size)
        stored = vectors if has_scales(keys.dtype) else vectors.to(keys.dtype)
        reference.write_kv(stored[:, 0], stored[:, 1], keys, values, slots)
        pool[row, -(-(start + count) // block_size) :] = -1
    counts = torch.tensor([count for _, count in rows])
    storage = keys.as_strided((keys.untyped_storage().nbytes() // keys.itemsize,), (1,), 0).to(device)
    keys, values = (storage.as_strided(cache.shape, cache.stride(), cache.storage_offset()) for cache in (keys, values))
    return Case(
        torch.randn(int(counts.sum()), heads, dim).to(dtype).to(device),
        keys,
        values,
        torch.cat((torch.zeros(1, dtype=torch.int64), counts.cumsum(0))),
        torch.tensor([start for start, _ in rows]),
        pool.to(tables).to(device),
    )


MIXED = [(5, 1), (0, 27), (9, 1), (4, 7), (33, 3), (0, 1)]
DECODES = [(0, 1), (16, 1), (3, 1), (70, 1), (15, 1)]
LONG = [(600, 1), (3, 1), (290, 40), (255, 2), (511, 1)]


def check(case: Case, reduced: int = 100, **options: Any) -> None:
    result = case.run(**options)
    assert result.dtype == case.q.dtype
    assert result.is_contiguous()
    dtype = torch.float16 if case.q.dtype == torch.float16 else torch.float32
    expected = case.expected(**{name: value for name, value in options.items() if name != "batch_invariant"})
    assert_near(result, expected, dtype, reduced if dtype == torch.float32 else 1)


@pytest.mark.parametrize("rows", [MIXED, DECODES, LONG], ids=["mixed", "decodes", "segments"])
@pytest.mark.parametrize("options", [{}, {"window": 9}, {"window": 300, "softcap": 2.0}], ids=str)
@pytest.mark.parametrize("batch_invariant", [False, True])
def test_agrees_with_the_reference(
    device: torch.device, rows: Rows, options: dict[str, Any], batch_invariant: bool
) -> None:
    shape = {"heads": 3, "kv_heads": 1} if rows == LONG else {}
    check(make_case(device, rows, **shape), batch_invariant=batch_invariant, **options)


@pytest.mark.parametrize(
    ("heads", "kv_heads", "dim", "block_size", "tables"),
    [
        (3, 3, 80, 4, torch.int64),
        (4, 1, 96, 8, torch.int32),
        (20, 1, 128, 32, torch.int64),
        (71, 1, 64, 16, torch.int32),
        (4, 2, 256, 128, torch.int32),
        (2, 1, 10, 256, torch.int32),
        (2, 2, 64, 1, torch.int32),
    ],
)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_shapes(
    device: torch.device,
    heads: int,
    kv_heads: int,
    dim: int,
    block_size: int,
    tables: torch.dtype,
    dtype: torch.dtype,
) -> None:
    shape: dict[str, Any] = {"heads": heads, "kv_heads": kv_heads, "dim": dim, "block_size": block_size}
    check(make_case(device, [(40, 1), (21, 9)], dtype=dtype, tables=tables, **shape))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
@pytest.mark.parametrize("cache_dtype", [torch.int8, torch.float8_e4m3fn, torch.float32])
def test_caches_of_other_types(device: torch.device, dtype: torch.dtype, cache_dtype: torch.dtype) -> None:
    check(make_case(device, [(600, 1), (0, 27), (4, 7)], dtype=dtype, cache_dtype=cache_dtype, block_size=8), 300)


@pytest.mark.parametrize("cache_dtype", [torch.int8, torch.float8_e4m3fn])
@pytest.mark.parametrize("batch_invariant", [False, True])
def test_small_scales_in_float16(device: torch.device, cache_dtype: torch.dtype, batch_invariant: bool) -> None:
    """Most weights times the scale of a small value are below what float16 has."""
    case = make_case(device, [(600, 1), (4, 7)], dtype=torch.float16, cache_dtype=cache_dtype)
    scales(case.values).mul_(1e-3)
    result = case.run(batch_invariant=batch_invariant)
    assert_near(result * 1000, case.expected() * 1000, torch.float16)


@pytest.mark.parametrize("rotated", [64, 40, 0])
@pytest.mark.parametrize("options", [{}, {"softcap": 2.0}], ids=str)
@pytest.mark.parametrize("cache_dtype", [torch.int8, torch.float8_e4m3fn], ids=str)
def test_biases_that_the_cache_lacks(
    device: torch.device, rotated: int, options: dict[str, float], cache_dtype: torch.dtype
) -> None:
    """KV8-01: the output is that of keys and values with biases. A softcap needs all of a head to be rotated."""
    if rotated < 64 and "softcap" in options:
        pytest.skip("never asked for")
    case = make_case(device, [(290, 1), *MIXED], cache_dtype=cache_dtype)
    bias = KVBias(torch.randn(2, 64).to(device) * 3, torch.randn(2, 64).to(device) * 3)
    table = torch.outer(torch.arange(300.0), torch.rand(rotated // 2).repeat(2)).to(device)
    cos_sin = (table.cos(), table.sin())
    result = case.run(bias=bias, angles=attention.pack_angles(*cos_sin) if rotated else None, **options)
    expected = case.expected(bias=bias, angles=cos_sin if rotated else None, **options)
    assert_near(result, expected, torch.float32, 300)


def test_queries_of_any_strides(device: torch.device) -> None:
    case = make_case(device, MIXED)
    expected = case.run()
    wide = torch.zeros(case.q.shape[0], case.q.shape[1] + 3, case.q.shape[2], device=device)
    wide[:, 1:-2] = case.q
    assert torch.equal(case._replace(q=wide[:, 1:-2]).run(), expected)
    across = case.q.transpose(1, 2).contiguous().transpose(1, 2)
    assert torch.equal(case._replace(q=across).run(), expected)


def test_rows_on_the_device_and_rows_that_are_padding(device: torch.device) -> None:
    """Lengths need not be known on the host; a row without queries writes nothing."""
    case = make_case(device, MIXED)
    expected = case.run()
    offsets = torch.cat((case.offsets, case.offsets[-1:].expand(3)))
    padded = case._replace(
        offsets=offsets.to(device),
        starts=torch.cat((case.starts, torch.zeros(3, dtype=torch.int64))).to(device),
        tables=torch.cat((case.tables, torch.full_like(case.tables[:3], -1))),
    )
    rows = BatchRows(padded.offsets, padded.starts, torch.arange(len(padded.starts), device=device), case.rows.lengths)
    plan = attention.plan_attention(rows, padded.tables, block_size=16, num_kv_heads=2)
    assert plan.has_longer_rows
    assert torch.equal(attention.paged_attention(padded.q, padded.keys, padded.values, plan, scale=0.3), expected)
    decodes = make_case(device, DECODES)
    plan = attention.plan_attention(decodes.rows, decodes.tables, block_size=16, num_kv_heads=2)
    assert (plan.few, plan.has_longer_rows) == (1, False)
    out = attention.paged_attention(decodes.q, decodes.keys, decodes.values, plan, scale=0.3)
    assert torch.equal(out, decodes.run())


@pytest.mark.parametrize("window", [0, 700])
@pytest.mark.parametrize("batch_invariant", [False, True])
def test_segments_grow_with_the_context(
    device: torch.device, window: int, batch_invariant: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(attention, "SEGMENTS", 2)
    case = make_case(device, [(1030, 1), (3, 1), (700, 1), (505, 9)], heads=2, kv_heads=1)
    check(case, 1000, window=window, batch_invariant=batch_invariant)
    if batch_invariant:
        whole = case.run(window=window, batch_invariant=True)
        single = case.row(3, 6, 1).run(window=window, batch_invariant=True)
        assert torch.equal(single, whole[9:10])


@pytest.mark.parametrize("window", [0, 300])
def test_bits_do_not_depend_on_the_batch(device: torch.device, window: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """The same query in a prompt, in pieces of it, by itself, and with its segments shared by one program or many."""
    case = make_case(device, [(480, 60), (5, 1)], heads=3, kv_heads=1)
    options: dict[str, Any] = {"window": window, "batch_invariant": True}
    whole = case.run(**options)
    pieces = [case.row(0, first, count).run(**options) for first, count in [(0, 25), (25, 3), (28, 31), (59, 1)]]
    assert torch.equal(torch.cat(pieces), whole[:60])
    assert torch.equal(case.row(1).run(**options), whole[60:])
    for splits in (1, 2):
        monkeypatch.setattr(attention, "choose_splits", lambda *_, splits=splits: splits)
        assert torch.equal(case.row(0, 59, 1).run(**options), whole[59:60])


@pytest.mark.parametrize(
    ("context", "counts", "kernels"),
    [
        (256, [1, 1, 1], ["_attend"]),
        (4096, [1, 1, 1], ["_attend", "_add_segments"]),
        (4096, [300], ["_attend"]),
        (4096, [1, 300, 1], ["_attend", "_add_segments", "_attend"]),
    ],
    ids=["one segment", "segments", "chunk", "both"],
)
def test_launches_without_a_wait(context: int, counts: list[int], kernels: list[str]) -> None:
    """The meta device raises for an operation that would wait for a GPU."""
    layout = KVLayout(1, 2, 64, 16, torch.int8)
    keys, values = layout.views(layout.allocate(512, torch.device("meta")))[0]
    tables = torch.empty(len(counts), context // 16, dtype=torch.int32, device="meta")
    offsets = torch.tensor([0, *counts]).cumsum(0)
    rows = BatchRows.of(offsets, context - offsets.diff()).to(torch.device("meta"))
    plan = attention.plan_attention(rows, tables, block_size=16, num_kv_heads=2)
    q = torch.empty(sum(counts), 6, 64, device="meta", dtype=torch.float16)
    with record() as launches:
        attention.paged_attention(q, keys, values, plan, scale=0.3)
    assert [launch.kernel for launch in launches] == kernels


def test_programs_that_share_segments() -> None:
    """Enough for every multiprocessor, but no more than there are segments."""
    assert attention.choose_splits(rows=1, kv_heads=8, segments=64, processors=132) == 64
    assert attention.choose_splits(rows=64, kv_heads=8, segments=16, processors=132) == 5
    assert attention.choose_splits(rows=1024, kv_heads=8, segments=16, processors=132) == 1


def test_shapes_that_are_refused(device: torch.device) -> None:
    case = make_case(device, MIXED)
    with pytest.raises(ValueError, match="blocks of"):
        attention.plan_attention(case.rows, case.tables, block_size=12, num_kv_heads=2)
    with pytest.raises(ValueError, match="do not fit"):
        case._replace(q=case.q[:, :5]).run()
    with pytest.raises(ValueError, match="does not serve"):
        case._replace(q=case.q.half(), keys=case.keys.bfloat16(), values=case.values.bfloat16()).run()
    keys, values = (cache.to(torch.float8_e5m2) for cache in (case.keys, case.values))
    with pytest.raises(ValueError, match="float8_e5m2 does not serve"):
        case._replace(keys=keys, values=values).run()
    with pytest.raises(ValueError, match="at most 256"):
        attention.choose_tiles(320, 1, torch.float16)
