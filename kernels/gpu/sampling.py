"""Penalties, the choice of tokens and their log-probabilities; formulas and rules stand in kernels/reference.

    sample       (_mask_tokens ─▶) _tile_maxima ─▶ find_bounds (filters.py) ─▶ score_tiles ─▶ choose (gumbel.py)
    penalties    _count_tokens ─▶ _penalise
    logprobs     _scan_tiles ─▶ torch.topk of a few keys a tile ─▶ _finish_logprobs

A batch that is greedy needs the first and the last kernel of `sample`, and one without top_k and top_p not the second.
Nothing is sorted but the k likeliest tokens that are listed, and no length or parameter is read on the host.

The tokens are the reference's (gumbel.py and filters.py say how far), penalties are so to the bit, and the bits of a
row's log-probabilities depend on the row alone.
"""

from collections.abc import Iterator
from functools import partial

import torch
import triton
import triton.language as tl
from torch import Tensor

from kernels.gpu.filters import find_bounds
from kernels.gpu.gumbel import choose, score_tiles
from kernels.gpu.launch import Configuration, launch
from kernels.gpu.sampling_parameters import load_row, load_token, pack_metadata
from kernels.gpu.token_keys import LEAST, float_order, key_ids, key_values, make_keys
from kernels.reference.sampling import GREEDY_BELOW
from kernels.reference.sampling import LOGPROB_FLOOR as _LOGPROB_FLOOR
from kernels.sampling_metadata import SamplingMetadata

TILE = 1024
"""Tokens of a program that reads logits."""

GROUP = 128
"""Tokens whose largest logit bounds what top_k keeps."""

CAPACITY = 4096
"""Tokens of a row among which top_k and top_p search, before they search the row itself."""

LIST_BLOCK, ROW_BLOCK = 512, 1024
"""Tokens that `find_bounds` takes at a time, of its list and of a row: with more of a row it would spill registers."""

SELECTED = (0, 5, 20)
"""How many of a tile's likeliest tokens are selected one by one for `logprobs`, the next that suffices for k: each is
an object of its own. With a larger k all tokens go to torch.topk."""

IN_PROMPT = tl.constexpr(1 << 30)
LOGPROB_FLOOR = tl.constexpr(_LOGPROB_FLOOR)


def sample(
    logits: Tensor, metadata: SamplingMetadata, packed: Tensor | None = None, masks: Tensor | None = None
) -> Tensor:
    """Return the likeliest token of each row, or one drawn within min_p, top_k and top_p.

    Bytes moved, of float32 logits: 4 V a greedy row, 8 V a drawn one, 12 V one with top_k or top_p, and 8 V more one
    with a mask.
    """
    logits = _check_logits(logits)
    if len(metadata) and not 0 <= metadata.rows.min() <= metadata.rows.max() < len(logits):
        raise ValueError(f"no such row of logits: there are {len(logits)}")
    if len(metadata) and metadata.masks.max() >= (0 if masks is None else len(masks)):
        raise ValueError("a token's mask is none of the masks")
    is_random = metadata.temperature >= GREEDY_BELOW
    is_filtered = is_random & ((metadata.top_k > 0) | (metadata.top_p < 1))
    if packed is None:
        packed = torch.from_numpy(pack_metadata(metadata)).to(logits.device)
    tokens, parameters = packed[: 4 * len(metadata)], packed[4 * len(metadata) :]
    masked = None if masks is None else mask_tokens(logits, tokens, masks)
    return sample_packed(logits, tokens, parameters, bool(is_random.any()), bool(is_filtered.any()), masked)


def sample_packed(
    logits: Tensor,
    tokens: Tensor,  # (4 N,) int32: records, see sampling_parameters.py
    parameters: Tensor,  # (8 slots,) int32: records
    is_random: bool,  # whether any of the N tokens is drawn
    is_filtered: bool,  # whether any of these uses top_k or top_p
    masked: Tensor | None = None,  # (N, V): the logits of tokens that have a mask
) -> Tensor:
    """Return tokens (N,) int64 by parameters that lie on the device."""
    count, vocab = len(tokens) // 4, logits.shape[1]
    tiles = triton.cdiv(vocab, TILE)
    groups = tiles * TILE // GROUP
    new, rows = logits.new_empty, (logits, logits.stride(0), logits if masked is None else masked, tokens)
    maxima, chosen = new((count, tiles), dtype=torch.int64), new(count, dtype=torch.int64)
    group_maxima = new((count, groups), dtype=torch.int64) if is_filtered else None
    launch(_tile_maxima, (count, tiles), *rows, maxima, group_maxima, vocab, tiles, TILE=TILE, GROUP=GROUP)
    bounds = scores = winners = tails = None
    if is_filtered:
        bounds, candidates = new(count, dtype=torch.int64), new((count, CAPACITY), dtype=torch.int64)
        arguments = (parameters, maxima, group_maxima, candidates, bounds, vocab, tiles, groups)
        launch(
            find_bounds,
            (count,),
            *rows,
            *arguments,
            num_warps=8,
            GROUP=GROUP,
            CAPACITY=CAPACITY,
            LIST_BLOCK=LIST_BLOCK,
            ROW_BLOCK=ROW_BLOCK,
        )
    if is_random:
        scores, tails = (new((count, tiles), dtype=torch.float64) for _ in range(2))
        winners = new((count, tiles), dtype=torch.int32)
        results = (scores, winners, tails)
        launch(score_tiles, (count, tiles), *rows, parameters, maxima, bounds, *results, vocab, tiles, TILE=TILE)
    tile_results = (maxima, bounds, scores, winners, tails)
    launch(choose, (count,), *rows, parameters, *tile_results, chosen, vocab, tiles, BLOCK=TILE)
    return chosen


def mask_tokens(logits: Tensor, tokens: Tensor, masks: Tensor) -> Tensor:
    """Return logits (N, V), -inf where a token's mask does not allow one. A row without a mask means nothing."""
    count, vocab = len(tokens) // 4, logits.shape[1]
    if masks.dtype != torch.int32 or masks.dim() != 2 or masks.shape[1] != triton.cdiv(vocab, 32):
        raise ValueError("masks must be (masks, vocabulary / 32), int32")
    masked = logits.new_empty((count, vocab))
    arguments = (logits, logits.stride(0), tokens, masks.contiguous(), masked, vocab, masks.shape[1])
    launch(_mask_tokens, (count, triton.cdiv(vocab, TILE)), *arguments, TILE=TILE)
    return masked


@triton.jit
def _mask_tokens(
    logits,  # (S, V) float32
    logits_stride,
    tokens,  # records
    masks,  # (M, words) int32
    masked,  # (N, V) float32, written where tokens have masks
    vocab,
    words,
    TILE: tl.constexpr,
):
    index = tl.program_id(0).to(tl.int64)
    mask = tl.load(tokens + index * 4 + 3).to(tl.int64)
    if mask >= 0:
        ids = tl.program_id(1) * TILE + tl.arange(0, TILE)
        inside = ids < vocab
        row, _, _ = load_token(tokens, index)
        x = tl.load(logits + row * logits_stride + ids, mask=inside, other=0.0)
        word = tl.load(masks + mask * words + ids // 32, mask=inside, other=0)
        is_allowed = ((word >> (ids % 32)) & 1) == 1
        tl.store(masked + index * vocab + ids, tl.where(is_allowed, x, float("-inf")), mask=inside)


@triton.jit
def _tile_maxima(
    logits,  # (S, V) float32
    logits_stride,
    masked,  # (N, V) float32
    tokens,  # records
    maxima,  # (N, tiles) int64, written
    group_maxima,  # (N, tiles * TILE / GROUP) int64, written; or None
    vocab,
    tiles,
    TILE: tl.constexpr,
    GROUP: tl.constexpr,
):
    index = tl.program_id(0).to(tl.int64)
    tile = tl.program_id(1)
    x = load_row(logits, logits_stride, masked, vocab, tokens, index)
    keys = _tile_keys(x, tile * TILE + tl.arange(0, TILE), vocab)
    out = index * tiles + tile
    if group_maxima is not None:
        GROUPS: tl.constexpr = TILE // GROUP
        grouped = tl.max(tl.reshape(keys, [GROUPS, GROUP]), 1)
        tl.store(group_maxima + out * GROUPS + tl.arange(0, GROUPS), grouped)
    tl.store(maxima + out, tl.max(keys, 0))


@triton.jit
def _tile_keys(x, ids, vocab):
    values = tl.load(x + ids, mask=ids < vocab, other=float("-inf"))
    return tl.where(ids < vocab, make_keys(values, ids), LEAST)


def penalties(
    logits: Tensor,
    tokens: Tensor,
    prompt_lens: Tensor,
    lengths: Tensor,
    repetition: Tensor,
    presence: Tensor,
    frequency: Tensor,
) -> Tensor:
    """Return the logits with penalties. Bytes moved: 16 V a row, and 4 or 8 for each of its tokens."""
    logits = _check_logits(logits)
    rows, vocab = logits.shape
    factors = (repetition, presence, frequency)
    if len(tokens) != rows or tokens.dim() != 2 or any(x.shape != (rows,) for x in (prompt_lens, lengths, *factors)):
        raise ValueError("penalties take tokens (rows, length), and one length and one parameter a row")
    if any(x.dtype != torch.float32 for x in factors):
        raise ValueError("penalties must be float32, as the logits are")
    counts = logits.new_zeros((rows, vocab), dtype=torch.int32)
    count_tokens(counts, tokens, prompt_lens, lengths)
    penalised = torch.empty_like(logits, memory_format=torch.contiguous_format)
    arguments = (logits, logits.stride(0), counts, *(x.contiguous() for x in factors), penalised, vocab)
    grid = (rows, triton.cdiv(vocab, TILE))
    launch(_penalise, grid, *arguments, enable_fp_fusion=False, TILE=TILE)  # fused, bits would differ
    return penalised


def count_tokens(
    counts: Tensor,  # (rows, V) int32, added to: occurrences in the output, plus `IN_PROMPT` if it is in the prompt
    tokens: Tensor,  # (rows, L) int32 or int64
    prompt_lens: Tensor,  # (rows,) int64
    lengths: Tensor,  # (rows,) int64
) -> None:
    """Count the tokens of each row. Counts are integers, so the order in which programs add does not matter."""
    rows, width = tokens.shape
    row_tokens = (tokens, *tokens.stride(), prompt_lens.contiguous(), lengths.contiguous())
    launch(_count_tokens, (rows, triton.cdiv(width, TILE)), counts, *row_tokens, counts.shape[1], width, BLOCK=TILE)


@triton.jit(do_not_specialize=["row_stride", "column_stride", "width"])
def _count_tokens(counts, tokens, row_stride, column_stride, prompt_lens, lengths, vocab, width, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    places = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    is_token = (places < tl.load(lengths + row)) & (places < width)
    ids = tl.load(tokens + row * row_stride + places.to(tl.int64) * column_stride, mask=is_token, other=0)
    is_token = is_token & (ids >= 0) & (ids < vocab)
    in_output = places >= tl.load(prompt_lens + row)
    count = counts + row * vocab + ids
    tl.atomic_add(count, 1, mask=is_token & in_output, sem="relaxed")
    tl.atomic_or(count, IN_PROMPT, mask=is_token & (in_output == 0), sem="relaxed")


@triton.jit
def _penalise(
    logits,  # (S, V) float32
    logits_stride,
    counts,  # (S, V) int32
    repetition,  # (S,) float32
    presence,
    frequency,
    penalised,  # (S, V) float32, written
    vocab,
    TILE: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    ids = tl.program_id(1) * TILE + tl.arange(0, TILE)
    inside = ids < vocab
    x = tl.load(logits + row * logits_stride + ids, mask=inside, other=0.0)
    count = tl.load(counts + row * vocab + ids, mask=inside, other=0)
    number = count & (IN_PROMPT - 1)
    factor = tl.load(repetition + row)
    repeated = tl.where(x > 0, tl.div_rn(x, factor), x * factor)
    repeated = repeated - tl.load(frequency + row) * number.to(tl.float32)
    repeated = repeated - tl.load(presence + row) * (number > 0).to(tl.float32)
    tl.store(penalised + row * vocab + ids, tl.where(count > 0, repeated, x), mask=inside)


def logprobs(logits: Tensor, tokens: Tensor, k: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """log p(token) = x[token] - log Σ exp(x), the token's rank, and the k likeliest tokens with theirs.

    Bytes moved: 4 V a row and 8 k a tile; 20 V if k is above 20, besides what torch.topk moves.
    """
    logits = _check_logits(logits)
    rows, vocab = logits.shape
    if tokens.shape != (rows,) or not 0 <= k <= vocab:
        raise ValueError(f"log-probabilities need a token a row, and k of {vocab} tokens")
    tokens, tiles = tokens.contiguous(), triton.cdiv(vocab, TILE)
    selected = next((size for size in SELECTED if k <= size), TILE)
    keys = logits.new_empty((rows, tiles * selected), dtype=torch.int64)
    peaks, sums = (logits.new_empty((rows, tiles)) for _ in range(2))
    higher = logits.new_empty((rows, tiles), dtype=torch.int32)
    row_tokens = (logits, logits.stride(0), tokens)
    launch(
        _scan_tiles, (rows, tiles), *row_tokens, peaks, sums, higher, keys, vocab, tiles, SELECTED=selected, TILE=TILE
    )
    best = torch.topk(keys, k, dim=-1).values if k else keys
    chosen, top_values = logits.new_empty(rows), logits.new_empty((rows, k))
    ranks, top_ids = (logits.new_empty(shape, dtype=torch.int64) for shape in ((rows,), (rows, k)))
    results = (chosen, ranks, top_ids, top_values)
    launch(_finish_logprobs, (rows,), *row_tokens, peaks, sums, higher, best, *results, tiles, k, BLOCK=128)
    return results


@triton.jit
def _scan_tiles(
    logits,  # (S, V) float32
    logits_stride,
    tokens,  # (S,) int64
    peaks,  # (S, tiles) float32, written: the largest logit of a tile
    sums,  # (S, tiles) float32, written: Σ exp(x - peak)
    higher,  # (S, tiles) int32, written: how many tokens rank before the row's
    keys,  # (S, tiles * SELECTED) int64, written: keys of the likeliest tokens of a tile
    vocab,
    tiles,
    SELECTED: tl.constexpr,
    TILE: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    tile = tl.program_id(1)
    ids = tile * TILE + tl.arange(0, TILE)
    x = tl.load(logits + row * logits_stride + ids, mask=ids < vocab, other=float("-inf"))
    tile_keys = tl.where(ids < vocab, make_keys(x, ids), LEAST)
    out = row * tiles + tile
    token = tl.load(tokens + row)
    value = tl.load(logits + row * logits_stride + token)
    is_higher = (x > value) | ((x == value) & (ids < token))
    tl.store(higher + out, tl.sum((is_higher & (ids < vocab)).to(tl.int32), 0))

    peak = key_values(tl.max(tile_keys, 0))
    shift = tl.where(peak == float("-inf"), 0.0, peak)
    tl.store(peaks + out, peak)
    tl.store(sums + out, tl.sum(tl.exp(x - shift), 0))
    if SELECTED == TILE:
        tl.store(keys + out * TILE + tl.arange(0, TILE), tile_keys)
    else:
        for i in range(SELECTED):
            best = tl.max(tile_keys, 0)
            tl.store(keys + out * SELECTED + i, best)
            tile_keys = tl.where(tile_keys == best, LEAST, tile_keys)


@triton.jit
def _floor(logprob):
    return tl.where(logprob > LOGPROB_FLOOR, logprob, LOGPROB_FLOOR)  # of NaN too


@triton.jit(do_not_specialize=["k"])
def _finish_logprobs(
    logits,  # (S, V) float32
    logits_stride,
    tokens,  # (S,) int64
    peaks,  # (S, tiles) float32
    sums,  # (S, tiles) float32
    higher,  # (S, tiles) int32
    keys,  # (S, k) int64
    chosen,  # (S,) float32, written
    ranks,  # (S,) int64, written
    top_ids,  # (S, k) int64, written
    top_values,  # (S, k) float32, written
    tiles,
    k,
    BLOCK: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    order = tl.full([BLOCK], -(2**31), tl.int32)
    for start in range(0, tiles, BLOCK):
        offsets = start + tl.arange(0, BLOCK)
        peak = tl.load(peaks + row * tiles + offsets, mask=offsets < tiles, other=float("-inf"))
        order = tl.maximum(order, float_order(peak))
    peak = key_values(tl.max(order, 0).to(tl.int64) << 32)
    mass = tl.zeros([BLOCK], tl.float64)
    rank = tl.full([BLOCK], 0, tl.int64)
    for start in range(0, tiles, BLOCK):
        offsets = start + tl.arange(0, BLOCK)
        tile_peak = tl.load(peaks + row * tiles + offsets, mask=offsets < tiles, other=float("-inf"))
        tile_sum = tl.load(sums + row * tiles + offsets, mask=offsets < tiles, other=0.0)
        mass += tl.exp(tile_peak - peak).to(tl.float64) * tile_sum.to(tl.float64)
        rank += tl.load(higher + row * tiles + offsets, mask=offsets < tiles, other=0)
    total = (peak.to(tl.float64) + tl.log(tl.sum(mass, 0))).to(tl.float32)
    value = tl.load(logits + row * logits_stride + tl.load(tokens + row))
    tl.store(chosen + row, _floor(value - total))
    tl.store(ranks + row, tl.sum(rank, 0) + 1)
    for start in range(0, k, BLOCK):
        offsets = start + tl.arange(0, BLOCK)
        best = tl.load(keys + row * k + offsets, mask=offsets < k, other=LEAST)
        tl.store(top_ids + row * k + offsets, key_ids(best).to(tl.int64), mask=offsets < k)
        tl.store(top_values + row * k + offsets, _floor(key_values(best) - total), mask=offsets < k)


def _check_logits(logits: Tensor) -> Tensor:
    """Return the logits with a row's neighbours side by side."""
    if logits.dim() != 2 or logits.dtype != torch.float32 or not 0 < logits.shape[1] < 2**31:
        raise ValueError(f"logits must be (rows, vocabulary) float32, not {tuple(logits.shape)} {logits.dtype}")
    return logits if logits.stride(1) == 1 else logits.contiguous()


def configurations() -> Iterator[Configuration]:
    """Yield the kernels for a vocabulary of Llama 3, whose rows are aligned, and of GPT-2, whose rows are not."""
    for vocab in (128256, 50257):
        rows = 64
        x = torch.empty(rows, vocab, device="meta")
        words = torch.empty(rows * 12, dtype=torch.int32, device="meta")
        arguments = (x, words[: rows * 4], words[rows * 4 :])
        masks = torch.empty(rows, triton.cdiv(vocab, 32), dtype=torch.int32, device="meta")
        size = x.numel() * 4
        shape = f"{rows} rows of {vocab}"
        yield Configuration(f"mask_tokens {vocab}", partial(mask_tokens, *arguments[:2], masks), shape, 2 * size)
        yield Configuration(f"sample greedy {vocab}", partial(sample_packed, *arguments, False, False), shape, size)
        yield Configuration(f"sample {vocab}", partial(sample_packed, *arguments, True, False), shape, 2 * size)
        yield Configuration(f"sample filtered {vocab}", partial(sample_packed, *arguments, True, True), shape, 3 * size)
        lengths, factors = words[:rows].long(), x[:, 0]
        for dtype in (torch.int32, torch.int64):
            tokens = torch.empty(rows, 1024, dtype=dtype, device="meta")
            run = partial(penalties, x, tokens, lengths, lengths, factors, factors, factors)
            name = str(dtype).removeprefix("torch.")
            yield Configuration(f"penalties {vocab} {name}", run, shape, 4 * size + tokens.nbytes)
        for k in SELECTED:
            yield Configuration(f"logprobs {vocab} top {k}", partial(logprobs, x, lengths, k), shape, size)
        yield Configuration(f"logprobs {vocab} top 50", partial(logprobs, x, lengths, 50), shape, 5 * size)
