"""The kernels that fill the GPU's cache write what the reference writes, to the same cells and no others."""

import math
from typing import Any

import pytest
import torch

from kernels.gpu import cache
from kernels.layout import scales
from kernels.reference import cache as reference
from tests.kernels.tolerance import assert_near


def make_cache(device: torch.device, kv_heads: int, dim: int, block_size: int, dtype: torch.dtype) -> Any:
    """Return storage of two layers, and its second layer's keys and values, filled with anything."""
    layout = cache.kv_layout(2, kv_heads, dim, block_size, dtype)
    storage = layout.allocate(64 // block_size + 1, device)
    storage.view(torch.uint8).random_(0, 60)  # no NaN in any type
    return storage, layout.views(storage)[1]


def places(quants: torch.Tensor) -> torch.Tensor:
    """Return the place of each quant among all that its type has, from the smallest to the largest."""
    if quants.dtype == torch.int8:
        return quants.int()
    bits = quants.view(torch.uint8).int()
    return torch.where(bits < 128, bits, 128 - bits)


SLOTS = [7, 60, 0, 16, 33, 41, 3]


@pytest.mark.parametrize(
    ("kv_heads", "dim", "block_size"), [(2, 64, 4), (3, 80, 16), (1, 10, 64), (40, 128, 8)], ids=str
)
@pytest.mark.parametrize(
    ("dtype", "cache_dtype"),
    [
        (torch.float32, torch.float32),
        (torch.float16, torch.float16),
        (torch.float32, torch.int8),
        (torch.float16, torch.int8),
        (torch.float32, torch.float8_e4m3fn),
        (torch.float16, torch.float8_e4m3fn),
    ],
    ids=str,
)
def test_write_kv(
    device: torch.device, kv_heads: int, dim: int, block_size: int, dtype: torch.dtype, cache_dtype: torch.dtype
) -> None:
    torch.manual_seed(dim)
    storage, (keys, values) = make_cache(device, kv_heads, dim, block_size, cache_dtype)
    expected = storage.clone()
    fused = torch.randn(len(SLOTS), 2 * kv_heads + 1, dim, device=device).to(dtype)
    slots = torch.tensor(SLOTS, device=device)
    cache.write_kv(fused[:, kv_heads:-1], fused[:, :kv_heads], keys, values, slots)
    views = (expected.as_strided(view.shape, view.stride(), view.storage_offset()) for view in (keys, values))
    reference.write_kv(fused[:, kv_heads:-1], fused[:, :kv_heads], *views, slots)
    assert torch.equal(storage.view(torch.uint8), expected.view(torch.uint8))


@pytest.mark.parametrize("cache_dtype", [torch.int8, torch.float8_e4m3fn], ids=str)
def test_eight_bits_of_a_vector_depend_on_it_alone(device: torch.device, cache_dtype: torch.dtype) -> None:
    new = torch.randn(5, 2, 10) * torch.tensor([1e-20, 1.0, 1e20, 0.0, 1.0])[:, None, None]
    new[4, 1, 3], new[1, 0, 2], new[0, 1] = math.inf, math.nan, 1e-35
    slots = torch.tensor([3, 4, 0, 11, 6], device=device)
    storage, (keys, values) = make_cache(device, 2, 10, 4, cache_dtype)
    expected = storage.clone()
    cache.write_kv(new.to(device), -new.to(device), keys, values, slots)
    expected_keys, expected_values = (
        expected.as_strided(view.shape, view.stride(), view.storage_offset()) for view in (keys, values)
    )
    reference.write_kv(new.to(device), -new.to(device), expected_keys, expected_values, slots)
    assert torch.equal(keys.view(torch.uint8), expected_keys.view(torch.uint8))
    assert torch.equal(values.view(torch.uint8), expected_values.view(torch.uint8))
    assert torch.equal(scales(keys).nan_to_num(7.0), scales(expected_keys).nan_to_num(7.0))
    assert scales(keys)[1, 1, 2].isnan()


def test_float8_is_rounded_as_torch_rounds_it(device: torch.device) -> None:
    """All numbers of bfloat16 up to 448, and those halfway between two of float8 with their neighbours on both sides.

    The largest of each vector is 448, so its scale is 1.
    """
    halves = torch.arange(2**15, dtype=torch.int32).to(torch.int16).view(torch.bfloat16).float()
    grid = torch.arange(127, dtype=torch.uint8).view(torch.float8_e4m3fn).float()
    ties = (grid[1:] + grid[:-1]) / 2
    nothing, everything = torch.zeros(()), torch.tensor(math.inf)
    numbers = torch.cat((halves[halves <= 448], ties, ties.nextafter(nothing), ties.nextafter(everything)))
    numbers = torch.cat((numbers, numbers.new_full((-len(numbers) % (8 * 255),), 448.0))).view(-1, 8, 255)
    new = torch.cat((numbers, numbers.new_full((*numbers.shape[:2], 1), 448.0)), 2).to(device)
    layout = cache.kv_layout(1, 8, 256, 16, torch.float8_e4m3fn)
    keys, values = layout.views(layout.allocate(-(-len(new) // 16), device))[0]
    cache.write_kv(new, -new, keys, values, torch.arange(len(new), device=device))
    for view, expected in ((keys, new), (values, -new)):
        stored = view.view(torch.uint8).transpose(1, 2).flatten(0, 1)[: len(new)]
        assert torch.equal(stored, expected.to(torch.float8_e4m3fn).view(torch.uint8))
        assert (scales(view).transpose(1, 2).flatten(0, 1)[: len(new)] == 1).all()


def test_padding_writes_nothing(device: torch.device) -> None:
    storage, (keys, values) = make_cache(device, 2, 16, 8, torch.float32)
    before = storage.clone()
    new = torch.randn(3, 6, 16, device=device)
    slots = torch.full((3,), -1, device=device)
    cache.write_kv(new[:, :2], new[:, 2:4], keys, values, slots)
    cache.rotate_and_store(new, keys, values, slots, positions=slots)
    assert torch.equal(storage, before)


@pytest.mark.parametrize("rotated", [None, 64, 24], ids=["not rotated", "rotated", "partly"])
@pytest.mark.parametrize("norm", [None, torch.float32, torch.float16], ids=["no norm", "float32 norm", "float16 norm"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16], ids=str)
@pytest.mark.parametrize(
    ("heads", "quants"),
    [((33, 3, 80), None), ((4, 2, 64), torch.int8), ((4, 2, 64), torch.float8_e4m3fn)],
    ids=["floats", "int8", "float8"],
)
def test_rotate_and_store(
    device: torch.device,
    rotated: int | None,
    norm: torch.dtype | None,
    dtype: torch.dtype,
    heads: tuple[int, int, int],
    quants: torch.dtype | None,
) -> None:
    """Quants may differ by one where the rotated numbers differ in their last bit."""
    q_heads, kv_heads, dim = heads
    torch.manual_seed(dim)
    storage, caches = make_cache(device, kv_heads, dim, 16, quants or dtype)
    expected = storage.clone()
    views = [expected.as_strided(view.shape, view.stride(), view.storage_offset()) for view in caches]
    wide = torch.randn(len(SLOTS), q_heads + 2 * kv_heads, dim + 8, device=device).to(dtype)
    options: dict[str, Any] = {"positions": torch.tensor([4, 90, 0, 17, 3, 99, 50], device=device)}
    if rotated:
        table = torch.outer(torch.arange(100.0), torch.rand(rotated // 2).repeat(2)).to(device)
        options["cos_sin"] = (table.cos() * 1.1, table.sin() * 1.1)
    if norm:
        weights = (torch.rand(2, dim, device=device) + 0.5).to(norm)
        options |= {"norms": (weights[0], weights[1]), "eps": 1e-5}
    slots = torch.tensor(SLOTS, device=device)
    before = wide.clone()
    q = cache.rotate_and_store(wide[..., :dim], *caches, slots, **options)
    expected_q = reference.rotate_and_store(wide[..., :dim], *views, slots, **options)
    assert q.dtype == dtype
    assert q.is_contiguous()
    assert torch.equal(wide, before)
    assert_near(q, expected_q, dtype, 4)
    for view, expected_view in zip(caches, views, strict=True):
        if quants:
            assert (places(view) - places(expected_view)).abs().max() <= 1
            assert_near(scales(view), scales(expected_view), dtype)
        else:
            assert_near(view, expected_view, dtype, 4)
    assert torch.equal(storage[0].view(torch.uint8), expected[0].view(torch.uint8))
    untouched = torch.ones(storage.shape[2] * 16, dtype=torch.bool)
    untouched[SLOTS] = False
    for view, expected_view in zip(caches, views, strict=True):
        cells, expected_cells = (part.transpose(1, 2).flatten(0, 1) for part in (view, expected_view))
        assert torch.equal(cells[untouched].float(), expected_cells[untouched].float())


@pytest.mark.parametrize(
    ("kv_heads", "dim", "block_size", "dtype"),
    [
        (2, 64, 16, torch.float16),
        (1, 5, 1, torch.float16),
        (3, 10, 4, torch.int8),
        (3, 10, 4, torch.float8_e4m3fn),
        (1, 7, 1, torch.float32),
    ],
    ids=str,
)
def test_copies_reach_all_layers_and_nothing_else(
    device: torch.device, kv_heads: int, dim: int, block_size: int, dtype: torch.dtype
) -> None:
    layout = cache.kv_layout(3, kv_heads, dim, block_size, dtype)
    storage = layout.allocate(7, device)
    storage.view(torch.uint8).random_(0, 60)
    expected = storage.clone()
    pairs = torch.tensor([(0, 4), (3, 1), (0, 6)], device=device)
    sources, destinations = pairs.T  # with a stride
    cache.copy_blocks(storage, sources, destinations)
    reference.copy_blocks(expected, sources, destinations)
    assert torch.equal(storage.view(torch.uint8), expected.view(torch.uint8))
    cache.copy_blocks(storage, sources[:0], destinations[:0])
    assert torch.equal(storage.view(torch.uint8), expected.view(torch.uint8))


def test_a_cache_of_another_layout_is_refused(device: torch.device) -> None:
    _, (keys, values) = make_cache(device, 2, 16, 8, torch.float32)
    new = torch.randn(3, 2, 16, device=device)
    slots = torch.arange(3, device=device)
    with pytest.raises(ValueError, match="one layout"):
        cache.write_kv(new, new, keys.transpose(2, 3).contiguous().transpose(2, 3), values, slots)
    with pytest.raises(ValueError, match="do not fit"):
        cache.write_kv(new[..., :8], new[..., :8], keys, values, slots)


def test_norms_and_tables_of_other_sizes_are_refused(device: torch.device) -> None:
    _, caches = make_cache(device, 2, 16, 8, torch.float32)
    qkv, slots = torch.randn(3, 6, 16, device=device), torch.arange(3, device=device)
    with pytest.raises(ValueError, match="norms"):
        cache.rotate_and_store(qkv, *caches, slots, positions=slots, norms=(qkv[0, 0], qkv[0, 0, :8]))
    for width in (3, 18):
        table = torch.zeros(9, width, device=device)
        with pytest.raises(ValueError, match="R even and at most 16"):
            cache.rotate_and_store(qkv, *caches, slots, positions=slots, cos_sin=(table, table))
