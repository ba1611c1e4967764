"""Int64 keys of a row's tokens: the likelier the token, the larger its key.

The order of the logit is in the upper half, the reversed id in the lower one. All keys of a row differ, so the
likeliest tokens, ties going to the lowest ids, are those whose keys are at least some bound; and a maximum of keys is
exact in whatever order it is taken. Keys of logits put NaN first, as torch's argmax does.
"""

import triton
import triton.language as tl

LEAST = tl.constexpr(-(2**63))
"""Less than the key of any token."""

GREATEST = tl.constexpr(2**63 - 1)
"""Greater than the key of any token."""

LOWEST_FLOAT = tl.constexpr(-3.4028234663852886e38)
"""The lowest finite float32. A bound at its key leaves out tokens of -inf."""


@triton.jit
def float_order(x):
    """Return int32 in the order of the float32 `x`: -0.0 is 0.0, and NaN comes after inf."""
    bits = tl.where(x == 0.0, 0.0, x).to(tl.int32, bitcast=True)
    order = tl.where(bits < 0, bits ^ 0x7FFFFFFF, bits)
    return tl.where(x == x, order, 0x7FFFFFFF)


@triton.jit
def make_keys(x, ids):
    return (float_order(x).to(tl.int64) << 32) | (0x7FFFFFFF - ids)


@triton.jit
def least_key(x):
    """Return a bound that is at most the key of every token whose value is at least `x`, and more than all others."""
    return float_order(x).to(tl.int64) << 32


@triton.jit
def key_ids(keys):
    return (0x7FFFFFFF - (keys & 0x7FFFFFFF)).to(tl.int32)


@triton.jit
def key_values(keys):
    order = (keys >> 32).to(tl.int32)
    return tl.where(order < 0, order ^ 0x7FFFFFFF, order).to(tl.float32, bitcast=True)


@triton.jit
def largest_key(keys, count, BLOCK: tl.constexpr):
    """Return the largest of `count` keys in memory."""
    largest = tl.full([BLOCK], LEAST, tl.int64)
    for start in range(0, count, BLOCK):
        offsets = start + tl.arange(0, BLOCK)
        largest = tl.maximum(largest, tl.load(keys + offsets, mask=offsets < count, other=LEAST))
    return tl.max(largest, 0)
