"""Makes random blocks of GGUF's types. The `gguf` package has no quantiser for most of them."""

import numpy as np
from gguf import quants
from gguf.constants import GGML_QUANT_SIZES, GGMLQuantizationType
from numpy.typing import NDArray

from benchmarks.quantized_checkpoints import FLOATS

_MIN_RATIOS = {"Q4_1": -7.5, "Q5_1": -15.5, "Q2_K": 1.5, "Q4_K": 7.5, "Q5_K": 15.5}
"""The min's number over the scale's, with which the mean of random values is zero."""


def random_blocks(
    type: GGMLQuantizationType, shape: tuple[int, ...], random: np.random.Generator, deviation: float = 0.3
) -> NDArray[np.uint8]:
    """Return blocks (..., n, bytes) of random values of a shape (..., inputs), with a standard deviation."""
    block, size = GGML_QUANT_SIZES[type]
    blocks = random.integers(0, 256, (*shape[:-1], shape[-1] // block, size), np.uint8)
    numbers = blocks.view(np.float16)
    scales = random.uniform(0.5, 1, numbers.shape[:-1])
    _set_numbers(numbers, type, scales)
    values = quants.dequantize(blocks.reshape(*shape[:-1], -1), type)
    _set_numbers(numbers, type, scales * (deviation / values.std()))
    return blocks


def _set_numbers(numbers: NDArray[np.float16], type: GGMLQuantizationType, scales: NDArray[np.float64]) -> None:
    scale, *mins = FLOATS[type.name]
    numbers[..., scale] = scales
    for place in mins:
        numbers[..., place] = scales * _MIN_RATIOS[type.name]
