"""top_k and top_p: the least key of each row that they keep, found by bisection instead of sorting.

A row's filters keep its likeliest tokens, so a bound says all (token_keys.py). One program finds it: from the maxima
of groups of 128 tokens (top_k), or from `REACH` (top_p), it knows a bound that is low enough, lists the few tokens
above that in one pass over the row, and bisects in the list. Where the list does not suffice or is too short, it
bisects over the row itself, in one pass a turn. A turn halves the range of keys; counts end the search as soon as
they decide it.

Masses are summed in float64: of float64 exponentials in the list, of float32 ones over a whole row. A draw within
1e-6 of a nucleus's limit may be decided otherwise than by the reference.

Bytes moved, per filtered row: the logits once and 8 bytes a listed token; once a turn, some 25, without a list.
"""

import triton
import triton.language as tl

from kernels.gpu.gumbel import REACH, is_finite, scale
from kernels.gpu.sampling_parameters import load_filters, load_row, load_temperature, load_token
from kernels.gpu.token_keys import GREATEST, LEAST, LOWEST_FLOAT, key_values, largest_key, least_key, make_keys


@triton.jit
def _load_keys(x, ids, vocab, peak, temperature):
    """Return z and keys of a row's tokens."""
    z = scale(tl.load(x + ids, mask=ids < vocab, other=float("-inf")), peak, temperature)
    return z, tl.where(ids < vocab, make_keys(z, ids), LEAST)


@triton.jit
def _measure_list(listed, count, bound, BLOCK: tl.constexpr):
    """Return how many of `count` keys are at least `bound`, their Σ exp(z), their least, and the others' largest."""
    number = tl.zeros([BLOCK], tl.int32)
    mass = tl.zeros([BLOCK], tl.float64)
    least = tl.full([BLOCK], GREATEST, tl.int64)
    largest = tl.full([BLOCK], LEAST, tl.int64)
    for start in range(0, count, BLOCK):
        offsets = start + tl.arange(0, BLOCK)
        keys = tl.load(listed + offsets, mask=offsets < count, other=LEAST)
        is_above = keys >= bound
        number += is_above.to(tl.int32)
        mass += tl.where(is_above, tl.exp(key_values(keys).to(tl.float64)), 0.0)
        least = tl.minimum(least, tl.where(is_above, keys, GREATEST))
        largest = tl.maximum(largest, tl.where(is_above, LEAST, keys))
    return tl.sum(number, 0), tl.sum(mass, 0), tl.min(least, 0), tl.max(largest, 0)


@triton.jit
def _measure_row(x, vocab, peak, temperature, bound, BLOCK: tl.constexpr):
    """Return the same of all tokens of a row."""
    number = tl.zeros([BLOCK], tl.int32)
    mass = tl.zeros([BLOCK], tl.float64)
    least = tl.full([BLOCK], GREATEST, tl.int64)
    largest = tl.full([BLOCK], LEAST, tl.int64)
    for start in tl.range(0, vocab, BLOCK, num_stages=4):
        z, keys = _load_keys(x, start + tl.arange(0, BLOCK), vocab, peak, temperature)
        is_above = keys >= bound
        number += is_above.to(tl.int32)
        mass += tl.where(is_above, tl.exp(z), 0.0).to(tl.float64)
        least = tl.minimum(least, tl.where(is_above, keys, GREATEST))
        largest = tl.maximum(largest, tl.where(is_above, LEAST, keys))
    return tl.sum(number, 0), tl.sum(mass, 0), tl.min(least, 0), tl.max(largest, 0)


@triton.jit
def _find_bound(
    is_listed, listed, row, low, needed, BY_MASS: tl.constexpr, LIST_BLOCK: tl.constexpr, ROW_BLOCK: tl.constexpr
):
    """Return the least of the fewest keys, from `low` upwards, whose number or mass is `needed`, and their mass.

    If all keys from `low` upwards have less, return `low`. The keys are a list (pointer, count) or those of a `row`
    (x, vocab, peak, temperature). The result lies between `low` and `high`. Each turn tries their middle and moves one
    of them to the next key there is, so turns follow from the number of keys and not from the number of bits.
    """
    high = tl.full((), GREATEST, tl.int64)
    middle = low
    mass = tl.zeros((), tl.float64)
    first = low == low
    while first | (low < high):
        if is_listed:
            number, mass_above, least, largest = _measure_list(listed[0], listed[1], middle, LIST_BLOCK)
        else:
            number, mass_above, least, largest = _measure_row(row[0], row[1], row[2], row[3], middle, ROW_BLOCK)
        amount = mass_above if BY_MASS else number
        if first | (amount >= needed):
            mass = mass_above
        if amount >= needed:
            low = least
            high = tl.where(amount == needed, low, high)
        else:
            high = largest
        middle = (low | high) - ((low ^ high) >> 1)  # their mean, rounded up; the sum might overflow
        first = low != low
    return low, mass


@triton.jit
def find_bounds(
    logits,  # (S, V) float32
    logits_stride,
    masked,  # (N, V) float32
    tokens,  # records
    parameters,
    maxima,  # (N, tiles) int64: the largest key of each tile's logits
    group_maxima,  # (N, groups) int64: the same of groups, of which the last ones may be empty
    candidates,  # (N, CAPACITY) int64, scratch
    bounds,  # (N,) int64, written
    vocab,
    tiles,
    groups,
    GROUP: tl.constexpr,
    CAPACITY: tl.constexpr,
    LIST_BLOCK: tl.constexpr,  # keys of a list that are taken at a time
    ROW_BLOCK: tl.constexpr,  # tokens of a row
):
    index = tl.program_id(0).to(tl.int64)
    _row, slot, _position = load_token(tokens, index)
    temperature = load_temperature(parameters, slot)
    top_k, top_p, min_z = load_filters(parameters, slot)
    has_top_k = (top_k > 0) & (top_k < vocab)
    peak_key = largest_key(maxima + index * tiles, tiles, 128)
    peak = key_values(peak_key)
    lowest = least_key(tl.maximum(min_z, LOWEST_FLOAT))
    bound = lowest
    if (temperature > 0) & is_finite(peak) & (has_top_k | (top_p < 1)):
        x = load_row(logits, logits_stride, masked, vocab, tokens, index)
        source = (x, vocab, peak, temperature)
        if not has_top_k:
            bound = tl.maximum(bound, least_key(peak * 0 - REACH))
        elif top_k * GROUP <= vocab:  # at least `top_k` groups have a token each
            group_keys = (group_maxima + index * groups, groups)
            least = least_key(peak * 0 - float("inf"))
            kth, mass = _find_bound(True, group_keys, source, least, top_k, False, LIST_BLOCK, ROW_BLOCK)
            bound = tl.maximum(bound, least_key(scale(key_values(kth), peak, temperature)))

        listed = candidates + index * CAPACITY
        count = tl.zeros((), tl.int32)
        above = tl.zeros([ROW_BLOCK], tl.float64)
        below = tl.zeros([ROW_BLOCK], tl.float64)
        for start in tl.range(0, vocab, ROW_BLOCK, num_stages=4):
            z, keys = _load_keys(x, start + tl.arange(0, ROW_BLOCK), vocab, peak, temperature)
            is_candidate = keys >= bound
            number = tl.sum(is_candidate.to(tl.int32), 0)
            if (number > 0) & (count + number <= CAPACITY):
                places = count + tl.cumsum(is_candidate.to(tl.int32), 0) - 1
                tl.store(listed + places, keys, mask=is_candidate)
            count += number
            weights = tl.exp(z)
            above += tl.where(is_candidate, weights, 0.0).to(tl.float64)
            below += tl.where((keys >= lowest) & (keys < bound), weights, 0.0).to(tl.float64)
        tl.debug_barrier()  # threads read what others wrote

        mass_above = tl.sum(above, 0)
        needed = top_p.to(tl.float64) * (mass_above + tl.sum(below, 0))
        # The list's masses are of float64 exponentials, so it must suffice by more than the rounding of float32 ones.
        is_enough = has_top_k | (mass_above * (1 - 1e-6) >= needed)
        is_listed = is_enough & (count <= CAPACITY)
        bound = tl.where(is_enough, bound, lowest)
        if has_top_k:
            bound, mass = _find_bound(is_listed, (listed, count), source, bound, top_k, False, LIST_BLOCK, ROW_BLOCK)
            needed = top_p.to(tl.float64) * mass
        if top_p < 1:
            bound, mass = _find_bound(is_listed, (listed, count), source, bound, needed, True, LIST_BLOCK, ROW_BLOCK)
    tl.store(bounds + index, bound)
