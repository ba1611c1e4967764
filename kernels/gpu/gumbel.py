"""Drawing a token of each row by noise, in two kernels; `kernels/reference/gumbel.py` has the rules.

    score_tiles   a program a tile of 1,024 tokens: its best noised token, and the weight of its tail
    choose        a program a row: the best of its tiles, or of the tail if that wins

Philox's words are the reference's, and noise is float64, so the tokens are the reference's too. Tails are sums of
float32 exponentials, which may differ from torch's in the last bits: a draw within 1e-6 of a tail's limit may be
decided otherwise. Float64 is slow on most GPUs, so a tile has noise only for tokens that can win it.

Bytes moved: the logits once, 20 bytes a tile besides.
"""

import triton
import triton.language as tl

from kernels.gpu.sampling_parameters import load_filters, load_noise_key, load_row, load_temperature, load_token
from kernels.gpu.token_keys import LOWEST_FLOAT, key_ids, key_values, largest_key, least_key, make_keys
from kernels.reference.gumbel import REACH as _REACH
from kernels.reference.gumbel import TAIL as _TAIL

REACH = tl.constexpr(_REACH)
TAIL = tl.constexpr(_TAIL)
MAX_LEVELS = tl.constexpr(16)
"""Levels of tails that are drawn from. Level l is reached with a probability below V e^(-8 l)."""

NO_TOKEN = tl.constexpr(0x7FFFFFFF)
STEP = tl.constexpr(2.0**-23)
SLACK = tl.constexpr(1e-3)


@triton.jit
def scale(x, peak, temperature):
    """Return z = (x - peak) / temperature, rounded as torch does."""
    return tl.div_rn(x - peak, temperature)


@triton.jit
def is_finite(x):
    return (x == x) & (tl.abs(x) < float("inf"))


@triton.jit
def noise_bits(tokens, seed, sample, position):
    """Return the 23 bits of which the noise of tokens, int32 or uint32, is made."""
    word, _, _, _ = tl.philox(seed, tokens, position, sample, 0)
    return word >> 9


@triton.jit
def token_noise(tokens, seed, sample, position):
    """Return the Gumbel noise of tokens, -log(-log(u)) in float64."""
    uniform = (noise_bits(tokens, seed, sample, position).to(tl.float64) + 0.5) * STEP
    return -tl.log(-tl.log(uniform))


@triton.jit
def best_noised(z, likely, ids, seed, sample, position):
    """Return the best score, float64, of a tile's likely tokens after noise, and the lowest id that has it.

    Since 1 - u <= -log(u) <= (1 - u) / u, the noise lies between log(u) - log(1 - u) and -log(1 - u). Float32 has u and
    1 - u exactly, and their logarithms well within `SLACK`. The few tokens whose upper bound reaches the best lower one
    get their noise in float64, one by one.
    """
    best = tl.full((), float("-inf"), tl.float64)
    winner = tl.full((), NO_TOKEN, tl.int32)
    if tl.max(likely.to(tl.int32), 0) > 0:
        uniform = (noise_bits(ids, seed, sample, position).to(tl.float32) + 0.5) * STEP
        upper = z - tl.log(1.0 - uniform)
        reached = tl.max(tl.where(likely, upper + tl.log(uniform), float("-inf")), 0)
        may_win = likely & (upper >= reached - SLACK)
        token = tl.min(tl.where(may_win, ids, NO_TOKEN), 0)
        while token < NO_TOKEN:
            value = tl.max(tl.where(ids == token, z, float("-inf")), 0)
            score = value.to(tl.float64) + token_noise(token, seed, sample, position)
            winner = tl.where(score > best, token, winner)
            best = tl.maximum(best, score)
            token = tl.min(tl.where(may_win & (ids > token), ids, NO_TOKEN), 0)
    return best, winner


@triton.jit
def tail_weights(z, in_tail):
    return tl.where(in_tail, tl.exp(z), 0.0).to(tl.float64)


@triton.jit
def tail_beats(best, weight, seed, sample, position, level):
    """Return whether the tail of a level wins; NaN never does."""
    token = (level.to(tl.int64) + TAIL).to(tl.uint32)
    score = tl.log(tl.where(weight > 0, weight, 1.0)) + token_noise(token, seed, sample, position)
    return (weight > 0) & (score > best)


@triton.jit
def load_scaled(x, ids, vocab, bound, peak, temperature):
    """Return z of a row's tokens `ids`, -inf where the filters drop one."""
    inside = ids < vocab
    z = scale(tl.load(x + ids, mask=inside, other=float("-inf")), peak, temperature)
    return tl.where(inside & (make_keys(z, ids) >= bound), z, float("-inf"))


@triton.jit
def load_bound(bounds, index, parameters, slot):
    """Return the least key that the filters keep; without `bounds` those are min_p alone."""
    if bounds is not None:
        bound = tl.load(bounds + index)
    else:
        bound = least_key(tl.maximum(load_filters(parameters, slot)[2], LOWEST_FLOAT))
    return bound


@triton.jit
def score_tiles(
    logits,  # (S, V) float32
    logits_stride,
    masked,  # (N, V) float32
    tokens,  # records
    parameters,
    maxima,  # (N, tiles) int64: the largest key of each tile
    bounds,  # (N,) int64: the least key that the filters keep; None if there are none but min_p
    scores,  # (N, tiles) float64, written
    winners,  # (N, tiles) int32, written
    tails,  # (N, tiles) float64, written
    vocab,
    tiles,
    TILE: tl.constexpr,
):
    index = tl.program_id(0).to(tl.int64)
    tile = tl.program_id(1)
    _row, slot, position = load_token(tokens, index)
    temperature = load_temperature(parameters, slot)
    if temperature > 0:
        peak = key_values(largest_key(maxima + index * tiles, tiles, 128))
        bound = load_bound(bounds, index, parameters, slot)
        seed, sample = load_noise_key(parameters, slot)
        ids = tile * TILE + tl.arange(0, TILE)
        x = load_row(logits, logits_stride, masked, vocab, tokens, index)
        z = load_scaled(x, ids, vocab, bound, peak, temperature)
        best, winner = best_noised(z, z >= -REACH, ids, seed, sample, position)
        out = index * tiles + tile
        tl.store(scores + out, best)
        tl.store(winners + out, winner)
        tl.store(tails + out, tl.sum(tail_weights(z, z < -REACH), 0))


@triton.jit
def descend(z, shifts, level, LEVELS: tl.constexpr):
    """Return z of the tokens that are left at a level, each shifted as the levels above it did; else -inf."""
    for above in range(level):
        shift = tl.sum(tl.where(tl.arange(0, LEVELS) == above, shifts, 0.0), 0)
        z = tl.where(z < -REACH, z, float("-inf")) - shift
    return z


@triton.jit
def draw_from_tail(x, vocab, bound, peak, temperature, seed, sample, position, BLOCK: tl.constexpr):
    """Return a token of the tail, drawn level by level, by one program in two passes over the row a level."""
    shifts = tl.zeros([MAX_LEVELS], tl.float32)
    level = tl.zeros((), tl.int32)
    token = tl.full((), NO_TOKEN, tl.int32)
    tail_wins = level == 0
    while tail_wins:
        top = tl.full([BLOCK], float("-inf"), tl.float32)
        for start in range(0, vocab, BLOCK):
            z = load_scaled(x, start + tl.arange(0, BLOCK), vocab, bound, peak, temperature)
            z = descend(z, shifts, level, MAX_LEVELS)
            top = tl.maximum(top, tl.where(z < -REACH, z, float("-inf")))
        shifts = tl.where(tl.arange(0, MAX_LEVELS) == level, tl.max(top, 0), shifts)
        level += 1
        best = tl.full((), float("-inf"), tl.float64)
        weights = tl.zeros([BLOCK], tl.float64)
        for start in range(0, vocab, BLOCK):
            ids = start + tl.arange(0, BLOCK)
            z = descend(load_scaled(x, ids, vocab, bound, peak, temperature), shifts, level, MAX_LEVELS)
            tile_best, tile_winner = best_noised(z, z >= -REACH, ids, seed, sample, position)
            if tile_best > best:
                best = tile_best
                token = tile_winner
            weights += tail_weights(z, z < -REACH)
        tail_wins = (level < MAX_LEVELS) & tail_beats(best, tl.sum(weights, 0), seed, sample, position, level)
    return token


@triton.jit
def choose(
    logits,  # (S, V) float32
    logits_stride,
    masked,  # (N, V) float32
    tokens,  # records
    parameters,
    maxima,  # (N, tiles) int64
    bounds,  # (N,) int64 or None
    scores,  # (N, tiles) float64; None if all rows are greedy
    winners,  # (N, tiles) int32
    tails,  # (N, tiles) float64
    chosen,  # (N,) int64, written
    vocab,
    tiles,
    BLOCK: tl.constexpr,
):
    index = tl.program_id(0).to(tl.int64)
    peak_key = largest_key(maxima + index * tiles, tiles, 128)
    token = key_ids(peak_key)
    if scores is not None:
        _row, slot, position = load_token(tokens, index)
        temperature = load_temperature(parameters, slot)
        peak = key_values(peak_key)
        if temperature > 0:
            token = vocab - 1  # there is no distribution, and the result must be an id
            if is_finite(peak):
                best = tl.full([128], float("-inf"), tl.float64)
                best_ids = tl.full([128], NO_TOKEN, tl.int32)
                weights = tl.zeros([128], tl.float64)
                for start in range(0, tiles, 128):
                    offsets = start + tl.arange(0, 128)
                    inside = offsets < tiles
                    score = tl.load(scores + index * tiles + offsets, mask=inside, other=float("-inf"))
                    ids = tl.load(winners + index * tiles + offsets, mask=inside, other=NO_TOKEN)
                    best_ids = tl.where(score > best, ids, best_ids)  # equal ones come later, so have higher ids
                    best = tl.maximum(best, score)
                    weights += tl.load(tails + index * tiles + offsets, mask=inside, other=0.0)
                top = tl.max(best, 0)
                token = tl.min(tl.where(best == top, best_ids, NO_TOKEN), 0)
                seed, sample = load_noise_key(parameters, slot)
                if tail_beats(top, tl.sum(weights, 0), seed, sample, position, tl.zeros((), tl.int32)):
                    bound = load_bound(bounds, index, parameters, slot)
                    x = load_row(logits, logits_stride, masked, vocab, tokens, index)
                    token = draw_from_tail(x, vocab, bound, peak, temperature, seed, sample, position, BLOCK)
    tl.store(chosen + index, token.to(tl.int64))
