"""The sampling parameters as they lie on the device: a record of 16 bytes a token, one of 32 bytes a slot.

A token's record names its slot. `pack_metadata` makes slots of its own, one a token.
"""

import numpy as np
import numpy.typing as npt
import triton
import triton.language as tl

from kernels.reference.sampling import GREEDY_BELOW
from kernels.sampling_metadata import SamplingMetadata

TOKEN = np.dtype([("row", "<i4"), ("slot", "<i4"), ("position", "<i4"), ("mask", "<i4")])
"""The row of the logits, the slot of the parameters, the position in the output, and the mask's index or -1."""

PARAMETERS = np.dtype(
    [
        ("seed", "<i8"),
        ("temperature", "<f4"),  # 0: greedy
        ("top_p", "<f4"),  # 1: off
        ("min_z", "<f4"),  # log(min_p); -inf: off
        ("top_k", "<i4"),  # 0: off
        ("sample", "<i4"),
        ("unused", "<i4"),
    ]
)
_MAX_INT32 = np.iinfo(np.int32).max


def pack_metadata(metadata: SamplingMetadata) -> npt.NDArray[np.int32]:
    """Return the records of N tokens, then those of as many slots: 12 N words."""
    count = len(metadata)
    words = np.empty(count * (TOKEN.itemsize + PARAMETERS.itemsize) // 4, np.int32)
    split = count * TOKEN.itemsize // 4
    tokens, parameters = words[:split].view(TOKEN), words[split:].view(PARAMETERS)
    tokens["row"], tokens["slot"], tokens["position"] = metadata.rows, np.arange(count), metadata.positions
    tokens["mask"], parameters["unused"] = metadata.masks, 0
    parameters["seed"], parameters["sample"] = metadata.seeds, metadata.samples
    parameters["temperature"] = np.where(metadata.temperature < GREEDY_BELOW, 0, metadata.temperature)
    parameters["top_p"], parameters["top_k"] = metadata.top_p, np.clip(metadata.top_k, 0, _MAX_INT32)
    with np.errstate(divide="ignore"):
        parameters["min_z"] = np.log(metadata.min_p.astype(np.float64))
    return words


@triton.jit
def load_token(tokens, index):
    """Return a token's row of the logits, its slot and its position."""
    token = tokens + index * 4
    return tl.load(token).to(tl.int64), tl.load(token + 1).to(tl.int64), tl.load(token + 2)


@triton.jit
def load_row(logits, logits_stride, masked, vocab, tokens, index):
    """Return where a token's logits lie: in row `index` of `masked` (N, V) if it has a mask, else in `logits`."""
    row, _, _ = load_token(tokens, index)
    has_mask = tl.load(tokens + index * 4 + 3) >= 0
    return tl.where(has_mask, masked + index * vocab, logits + row * logits_stride)


@triton.jit
def load_temperature(parameters, slot):
    return tl.load(parameters + slot * 8 + 2).to(tl.float32, bitcast=True)


@triton.jit
def load_filters(parameters, slot):
    """Return a slot's top_k, top_p and min_z."""
    slot_parameters = parameters + slot * 8
    top_p = tl.load(slot_parameters + 3).to(tl.float32, bitcast=True)
    min_z = tl.load(slot_parameters + 4).to(tl.float32, bitcast=True)
    return tl.load(slot_parameters + 5), top_p, min_z


@triton.jit
def load_noise_key(parameters, slot):
    """Return a slot's seed, uint64, and its sample."""
    slot_parameters = parameters + slot * 8
    low = tl.load(slot_parameters).to(tl.uint32, bitcast=True).to(tl.uint64)
    high = tl.load(slot_parameters + 1).to(tl.uint32, bitcast=True).to(tl.uint64)
    return (high << 32) | low, tl.load(slot_parameters + 6)
