"""Kernels in Triton that fill the paged cache, by the formulas of kernels/reference/cache.py.

    write_kv            reads keys and values once, writes them once
    rotate_and_store    reads the product of queries, keys and values once, writes each of them once
    copy_blocks         reads and writes each copied block once

A program has a token and some of its heads. The layout is `KVLayout`'s by default: a vector's dimensions lie side by
side. A cache of quants stores each vector with a scale of its own, so what is stored depends on no other vector. A
negative slot is padding: nothing is written for its token.
"""

from collections.abc import Callable, Iterator

import torch
import triton
import triton.language as tl
from torch import Tensor

from kernels.gpu.launch import Configuration, launch
from kernels.layout import KVLayout, has_scales, scales

_ELEMENTS = 2048
"""The most elements that a program takes (whole heads, and at least one): 16 a thread."""

_WORDS = 1024
"""Words of a block that a program copies."""


def kv_layout(num_layers: int, num_kv_heads: int, head_dim: int, block_size: int, dtype: torch.dtype) -> KVLayout:
    """Return the layout that the GPU's attention reads: keys and values alike, with the head's dimension last."""
    return KVLayout(num_layers, num_kv_heads, head_dim, block_size, dtype)


def write_kv(keys: Tensor, values: Tensor, key_cache: Tensor, value_cache: Tensor, slot_mapping: Tensor) -> None:
    """Launch one kernel for keys and values."""
    tokens, kv_heads, dim = keys.shape
    if keys.shape != values.shape:
        raise ValueError(f"keys {tuple(keys.shape)} and values {tuple(values.shape)} differ in shape")
    _check(kv_heads, dim, key_cache, value_cache, slot_mapping)
    keys, values = (x if x.stride(2) == 1 else x.contiguous() for x in (keys, values))
    block_d, block_h = _block(kv_heads, dim)
    launch(
        _write_kv,
        (tokens, -(-kv_heads // block_h)),
        keys,
        values,
        key_cache,
        value_cache,
        *_scales(key_cache, value_cache),
        slot_mapping,
        *keys.stride()[:2],
        *values.stride()[:2],
        *_strides(key_cache),
        num_warps=4,
        num_stages=1,
        KV_HEADS=kv_heads,
        DIM=dim,
        PAGE=key_cache.shape[2],
        BLOCK_H=block_h,
        BLOCK_D=block_d,
    )


def rotate_and_store(
    qkv: Tensor,
    key_cache: Tensor,
    value_cache: Tensor,
    slot_mapping: Tensor,
    *,
    positions: Tensor,
    cos_sin: tuple[Tensor, Tensor] | None = None,
    norms: tuple[Tensor, Tensor] | None = None,
    eps: float = 0.0,
) -> Tensor:
    """Launch one kernel for the norms, the rotation, the cache and the queries."""
    tokens, heads, dim = qkv.shape
    kv_heads = key_cache.shape[1]
    q_heads = heads - 2 * kv_heads
    _check(kv_heads, dim, key_cache, value_cache, slot_mapping)
    cos, sin, rotated = None, None, 0
    if cos_sin is not None:
        cos, sin = (table.contiguous() for table in cos_sin)
        rotated = cos.shape[1]
        if rotated % 2 or rotated > dim or cos.dtype != torch.float32 or sin.shape != cos.shape:
            raise ValueError(f"a rotation needs tables (P, R) of float32 with R even and at most {dim}")
    q_norm, k_norm = norms or (None, None)
    if any(weight.shape != (dim,) for weight in norms or ()):
        raise ValueError(f"the weights of the norms of heads of {dim} have other sizes")
    if qkv.stride(2) != 1:
        qkv = qkv.contiguous()
    q = torch.empty((tokens, q_heads, dim), dtype=qkv.dtype, device=qkv.device)
    block_d, block_h = _block(heads, dim)
    launch(
        _rotate_and_store,
        (tokens, -(-heads // block_h)),
        qkv,
        q,
        key_cache,
        value_cache,
        *_scales(key_cache, value_cache),
        slot_mapping,
        positions.contiguous() if rotated else None,
        cos,
        sin,
        q_norm,
        k_norm,
        eps,
        *qkv.stride()[:2],
        *_strides(key_cache),
        num_warps=4,
        num_stages=1,
        Q_HEADS=q_heads,
        KV_HEADS=kv_heads,
        DIM=dim,
        ROTATED=rotated,
        PAGE=key_cache.shape[2],
        BLOCK_H=block_h,
        BLOCK_D=block_d,
    )
    return q


def copy_blocks(storage: Tensor, sources: Tensor, destinations: Tensor) -> None:
    """Launch one kernel for all pairs and layers."""
    if not storage.is_contiguous() or sources.shape != destinations.shape:
        raise ValueError("copies need contiguous storage, and a destination for each source")
    layers, parts, blocks = storage.shape[:3]
    size = storage[0, 0, 0].numel() * storage.element_size()
    word = next(dtype for dtype in (torch.int64, torch.int32, torch.int16, torch.int8) if size % dtype.itemsize == 0)
    words = size // word.itemsize
    launch(
        _copy_blocks,
        (len(sources), layers * parts, -(-words // _WORDS)),
        storage.view(-1).view(word),
        sources.contiguous(),
        destinations.contiguous(),
        blocks,
        words,
        num_warps=4,
        num_stages=1,
        BLOCK=_WORDS,
    )


def configurations() -> Iterator[Configuration]:
    """Yield the kernels for caches of each type, with norms and rotations of each kind."""
    meta = torch.device("meta")
    slots = torch.empty(256, dtype=torch.int64, device=meta)
    for dim in (64, 80, 128, 256):
        for dtype in (torch.bfloat16, torch.int8, torch.float8_e4m3fn):
            layout = kv_layout(32, 8, dim, 16, dtype)
            storage = layout.allocate(64, meta)
            keys, values = layout.views(storage)[0]
            qkv = torch.empty(256, 48, dim, dtype=torch.bfloat16, device=meta)
            table = torch.empty(8192, dim, device=meta)
            norm = torch.empty(dim, dtype=torch.bfloat16, device=meta)
            name = f"{dim} {str(dtype).removeprefix('torch.')}"
            shape = f"256 tokens, 32/8 heads of {dim}"
            written = 256 * layout.bytes_per_token // layout.num_layers

            def write(qkv: Tensor = qkv, keys: Tensor = keys, values: Tensor = values) -> None:
                write_kv(qkv[:, 32:40], qkv[:, 40:], keys, values, slots)

            def rotate(
                qkv: Tensor = qkv,
                keys: Tensor = keys,
                values: Tensor = values,
                table: Tensor = table,
                norms: tuple[Tensor, Tensor] | None = None,
            ) -> None:
                rotate_and_store(
                    qkv, keys, values, slots, positions=slots, cos_sin=(table, table), norms=norms, eps=1e-6
                )

            def rotate_normed(norm: Tensor = norm, rotate: Callable[..., None] = rotate) -> None:
                rotate(norms=(norm, norm))

            read = qkv.numel() * 2
            oldest = 89 if dtype == torch.float8_e4m3fn else 80
            yield Configuration(f"write {name}", write, shape, read // 3 + written, oldest=oldest)
            for kind, run in (("rotate", rotate), ("norm and rotate", rotate_normed)):
                yield Configuration(f"{kind} {name}", run, shape, read + read * 2 // 3 + written, oldest=oldest)
    pairs = torch.empty(8, dtype=torch.int64, device=meta)
    yield Configuration(
        "copy", lambda: copy_blocks(storage, pairs, pairs), "8 blocks of 32 layers", 16 * layout.bytes_per_block
    )


def _check(kv_heads: int, dim: int, key_cache: Tensor, value_cache: Tensor, slot_mapping: Tensor) -> None:
    """Raise ValueError if the kernels cannot write to these caches."""
    if key_cache.shape != value_cache.shape or (key_cache.shape[1], key_cache.shape[3]) != (kv_heads, dim):
        raise ValueError(f"{kv_heads} heads of {dim} do not fit a cache {tuple(key_cache.shape)}")
    if key_cache.stride() != value_cache.stride() or key_cache.stride(3) != 1 or key_cache.dtype != value_cache.dtype:
        raise ValueError("the GPU's cache has keys and values of one layout and type, with the dimension last")
    if slot_mapping.stride(0) != 1:
        raise ValueError("slot_mapping must be contiguous")


def _block(heads: int, dim: int) -> tuple[int, int]:
    """Return the powers of two of dimensions and of heads that a program takes. They do not depend on the tokens."""
    block_d = triton.next_power_of_2(dim)
    return block_d, max(1, min(triton.next_power_of_2(heads), _ELEMENTS // block_d))


def _scales(key_cache: Tensor, value_cache: Tensor) -> tuple[Tensor | None, Tensor | None]:
    if not has_scales(key_cache.dtype):
        return None, None
    return scales(key_cache), scales(value_cache)


def _strides(cache: Tensor) -> tuple[int, ...]:
    """Return the strides of block, head and slot, and of the scales' block and head."""
    scale_strides = scales(cache).stride()[:2] if has_scales(cache.dtype) else (0, 0)
    return (*cache.stride()[:3], *scale_strides)


@triton.jit
def _round(x, dtype: tl.constexpr):
    """Return the nearest numbers of `dtype` (int8 or float8e4nv) that it has to `x` (float32), the even one of two.

    The cast that follows is then exact, whichever way it rounds: the interpreter's is wrong where a carry arises.
    """
    unit = 1.0
    sign = 1.0
    if dtype == tl.float8e4nv:
        bits = x.to(tl.int32, bitcast=True)
        power = (bits & 0x7F800000).to(tl.float32, bitcast=True)  # of two, at most |x|
        unit = tl.maximum(power, 0.015625) / 8.0  # three bits follow the first; below 2^-6 numbers are 2^-9 apart
        sign = tl.where(bits < 0, -1.0, 1.0)
        x = tl.abs(x)
    round_to = 12582912.0 * unit  # 1.5 * 2^23: the last bit of the sum is worth a unit
    return ((x + round_to) - round_to) * sign  # zeros keep their sign


@triton.jit
def _store(
    x,  # (BLOCK_H, BLOCK_D) float32
    cache,
    cache_scales,  # None: the cache has floats
    slot,
    heads,
    mask,  # (BLOCK_H,): the heads to store
    block_stride,
    head_stride,
    slot_stride,
    scale_block_stride,
    scale_head_stride,
    DIM: tl.constexpr,
    PAGE: tl.constexpr,
    BLOCK_D: tl.constexpr,
):
    """Store a token's vectors: as quants and scales if there are `cache_scales`, else as floats."""
    dtype: tl.constexpr = cache.dtype.element_ty
    LIMIT: tl.constexpr = 127.0 if dtype == tl.int8 else 448.0
    dims = tl.arange(0, BLOCK_D)
    block = slot // PAGE
    offset = slot % PAGE
    at = cache + block * block_stride + heads.to(tl.int64)[:, None] * head_stride + offset * slot_stride + dims[None, :]
    masks = mask[:, None] & (dims < DIM)[None, :]
    if cache_scales is None:
        tl.store(at, x.to(dtype), mask=masks)
    else:
        finite = tl.abs(x) < float("inf")
        broken = tl.max((~finite).to(tl.int32), 1) > 0
        x = tl.where(finite & (~broken)[:, None], x, 0.0)
        largest = tl.max(tl.abs(x), 1)
        tiny = largest < 1e-30  # its inverse would overflow
        one = tl.full(largest.shape, 1.0, tl.float32)
        inverse = tl.where(tiny, 0.0, LIMIT * tl.div_rn(one, tl.where(tiny, 1.0, largest)))
        quants = _round(tl.minimum(tl.maximum(x * inverse[:, None], -LIMIT), LIMIT), dtype)
        tl.store(at, quants.to(dtype), mask=masks)
        scale = tl.where(tiny, 0.0, tl.div_rn(largest, LIMIT * one))
        scale = tl.where(broken, float("nan"), scale)
        scale_at = block * scale_block_stride + heads.to(tl.int64) * scale_head_stride + offset
        tl.store(cache_scales + scale_at, scale, mask=mask)


# Tensors may be views into a step's buffer, with any alignment: one compiled object must serve all of them.
@triton.jit(do_not_specialize_on_alignment=["slot_mapping"])
def _write_kv(
    keys,
    values,
    key_cache,
    value_cache,
    key_scales,
    value_scales,
    slot_mapping,
    key_token_stride,
    key_stride,
    value_token_stride,
    value_stride,
    block_stride,
    head_stride,
    slot_stride,
    scale_block_stride,
    scale_head_stride,
    KV_HEADS: tl.constexpr,
    DIM: tl.constexpr,
    PAGE: tl.constexpr,
    BLOCK_H: tl.constexpr,
    BLOCK_D: tl.constexpr,
):
    token = tl.program_id(0).to(tl.int64)
    heads = tl.program_id(1) * BLOCK_H + tl.arange(0, BLOCK_H)
    dims = tl.arange(0, BLOCK_D)
    slot = tl.load(slot_mapping + token).to(tl.int64)
    mask = heads < tl.where(slot < 0, 0, KV_HEADS)
    masks = mask[:, None] & (dims < DIM)[None, :]
    at = token * key_token_stride + heads[:, None] * key_stride + dims[None, :]
    x = tl.load(keys + at, mask=masks, other=0.0).to(tl.float32)
    _store(
        x, key_cache, key_scales, slot, heads, mask, block_stride, head_stride, slot_stride, scale_block_stride,
        scale_head_stride, DIM, PAGE, BLOCK_D,
    )  # fmt: skip
    at = token * value_token_stride + heads[:, None] * value_stride + dims[None, :]
    x = tl.load(values + at, mask=masks, other=0.0).to(tl.float32)
    _store(
        x, value_cache, value_scales, slot, heads, mask, block_stride, head_stride, slot_stride, scale_block_stride,
        scale_head_stride, DIM, PAGE, BLOCK_D,
    )  # fmt: skip


@triton.jit
def _normalise(x, scale, is_query, q_norm, k_norm, at, used, dtype):
    """Return x * scale * weight at the dimensions `at`. As in the reference, x * scale is rounded to the weight's type
    before it is multiplied by the weight.

    The product is taken in float32, where it is exact for types of 16 bits, so it is rounded only once.
    """
    q_weight = tl.load(q_norm + at, mask=used, other=0.0)
    k_weight = tl.load(k_norm + at, mask=used, other=0.0)
    weight = tl.where(is_query[:, None], q_weight[None, :], k_weight[None, :])
    rounded = (x * scale[:, None]).to(weight.dtype).to(tl.float32)
    return (rounded * weight.to(tl.float32)).to(weight.dtype).to(dtype).to(tl.float32)


@triton.jit(do_not_specialize=["eps"], do_not_specialize_on_alignment=["slot_mapping", "positions"])
def _rotate_and_store(
    qkv,
    q,
    key_cache,
    value_cache,
    key_scales,
    value_scales,
    slot_mapping,
    positions,
    cos,
    sin,
    q_norm,
    k_norm,
    eps,
    token_stride,
    qkv_head_stride,
    block_stride,
    head_stride,
    slot_stride,
    scale_block_stride,
    scale_head_stride,
    Q_HEADS: tl.constexpr,
    KV_HEADS: tl.constexpr,
    DIM: tl.constexpr,
    ROTATED: tl.constexpr,
    PAGE: tl.constexpr,
    BLOCK_H: tl.constexpr,
    BLOCK_D: tl.constexpr,
):
    token = tl.program_id(0).to(tl.int64)
    heads = tl.program_id(1) * BLOCK_H + tl.arange(0, BLOCK_H)
    dims = tl.arange(0, BLOCK_D)
    is_query = heads < Q_HEADS
    is_value = heads >= Q_HEADS + KV_HEADS
    used = heads < Q_HEADS + 2 * KV_HEADS
    used_dims = dims < DIM
    dtype = qkv.dtype.element_ty
    rows = qkv + token * token_stride + heads[:, None] * qkv_head_stride
    x = tl.load(rows + dims[None, :], mask=used[:, None] & used_dims[None, :], other=0.0).to(tl.float32)

    result = x
    if q_norm is not None:
        scale = tl.rsqrt(tl.sum(x * x, 1) / DIM + eps)
        result = _normalise(x, scale, is_query, q_norm, k_norm, dims, used_dims, dtype)
    if ROTATED > 0:
        # Dimension i is paired with i + R / 2; the other dimensions stay.
        HALF: tl.constexpr = ROTATED // 2
        turning = dims < ROTATED
        partners = tl.where(dims < HALF, dims + HALF, dims - HALF)
        other = tl.load(rows + partners[None, :], mask=used[:, None] & turning[None, :], other=0.0).to(tl.float32)
        if q_norm is not None:
            other = _normalise(other, scale, is_query, q_norm, k_norm, partners, turning, dtype)
        at = tl.load(positions + token).to(tl.int64) * ROTATED + dims
        cosines = tl.load(cos + at, mask=turning, other=1.0)
        sines = tl.load(sin + at, mask=turning, other=0.0)
        sines = tl.where(dims < HALF, -sines, sines)
        rotated = tl.fma(other, tl.broadcast_to(sines[None, :], other.shape), result * cosines[None, :])
        result = tl.where(turning[None, :], rotated, result)
    if (q_norm is not None) or (ROTATED > 0):
        result = tl.where(is_value[:, None], x, result.to(dtype).to(tl.float32))

    at = (token * Q_HEADS + heads[:, None]) * DIM + dims[None, :]
    tl.store(q + at, result.to(dtype), mask=is_query[:, None] & used_dims[None, :])
    slot = tl.load(slot_mapping + token).to(tl.int64)
    stored = heads < tl.where(slot < 0, 0, Q_HEADS + 2 * KV_HEADS)
    is_key = stored & (heads >= Q_HEADS) & (heads < Q_HEADS + KV_HEADS)
    _store(
        result, key_cache, key_scales, slot, heads - Q_HEADS, is_key, block_stride, head_stride, slot_stride,
        scale_block_stride, scale_head_stride, DIM, PAGE, BLOCK_D,
    )  # fmt: skip
    _store(
        result, value_cache, value_scales, slot, heads - Q_HEADS - KV_HEADS, stored & is_value,
        block_stride, head_stride, slot_stride, scale_block_stride, scale_head_stride, DIM, PAGE, BLOCK_D,
    )  # fmt: skip


@triton.jit(do_not_specialize=["blocks"], do_not_specialize_on_alignment=["sources", "destinations"])
def _copy_blocks(storage, sources, destinations, blocks, words, BLOCK: tl.constexpr):
    pair = tl.program_id(0)
    part = tl.program_id(1).to(tl.int64)
    at = tl.program_id(2) * BLOCK + tl.arange(0, BLOCK)
    source = part * blocks + tl.load(sources + pair)
    destination = part * blocks + tl.load(destinations + pair)
    copied = tl.load(storage + source * words + at, mask=at < words)
    tl.store(storage + destination * words + at, copied, mask=at < words)
