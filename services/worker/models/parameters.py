"""`load_weights`: loads the parameters of a checkpoint onto the device, one at a time.

A parameter is allocated once, on the device and in its final type, and the checkpoint's tensors are copied into it: one
pass concatenates, converts and moves them. The decoder packs each parameter before it loads the next one, so that no
more than one unpacked parameter is in memory. Every name and shape is checked: a model with a random or missing weight
must not start.
"""

import logging
import math
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from mmap import MAP_ANONYMOUS, MAP_PRIVATE, mmap
from typing import get_args

import torch
from torch import Tensor

from kernels.quantized import QUANT_GROUP_SIZE, RoundedWeight, Weight, stack
from services.worker.checkpoint.quantization_config import CheckpointQuantization
from services.worker.checkpoint.weight_files import FLOATS, WeightFiles, check_float
from services.worker.models.decoder.layers import Weights
from services.worker.models.device_copy import copy_to
from services.worker.models.precision import Precision, Quantization
from services.worker.models.spec import DecoderSpec, parameter_shapes
from services.worker.models.tensor_map import ParameterSource, TensorMap
from shared.errors import ModelError
from shared.hub.progress import progress

logger = logging.getLogger(__name__)

_MIN_MAPPING = 2**16  # bytes
_COMPARED_ROWS = 256  # at once


class CheckpointWeights:
    """The parameters of a checkpoint, each read when it is loaded."""

    def __init__(
        self,
        files: WeightFiles,
        sources: Mapping[str, ParameterSource],
        precision: Precision,
        device: torch.device,
        report: Callable[[int], object],
    ) -> None:
        self._files, self._sources = files, sources
        self._precision, self.device = precision, device
        self._copy = copy_to(device)
        self._report = report  # called with the size of each loaded parameter, in bytes as if it were not quantised
        self.dequantized: list[str] = []  # tensors whose format matmuls cannot use

    def __contains__(self, name: str) -> bool:
        return name in self._sources

    def load(self, name: str) -> Tensor:
        """Return the parameter called `name`. Raise ModelError naming a tensor that cannot be read."""
        source = self._sources[name]
        rows = sum(tensor.shape[0] for tensor in source.tensors)
        parameter = _allocate((rows, *source.tensors[0].shape[1:]), self._precision.dtype, self.device)
        self._copy(self._parts(parameter, source))
        self._report(parameter.nbytes)
        return parameter

    def _parts(self, parameter: Tensor, source: ParameterSource) -> Iterator[tuple[Tensor, Tensor]]:
        """Yield the parts of `parameter`, each with the stored tensor that belongs there."""
        row = 0
        for tensor in source.tensors:
            stored = self._files.get(tensor.name)
            if tensor.expert is not None:
                stored = stored[tensor.expert]
            yield parameter[row : row + tensor.shape[0]], stored.T if source.transposed else stored
            row += tensor.shape[0]

    def load_matrix(self, name: str) -> Weight:
        """Return the matrix called `name`: with the checkpoint's quants, rounded to quants, or as floats."""
        if self._precision.quantization in get_args(CheckpointQuantization):
            tensors = self._sources[name].tensors
            stored = [self._files.get_quantized(tensor.name) for tensor in tensors]
            matrix = stack([part for part in stored if part is not None]) if all(stored) else None
            if matrix is not None:
                self._report(sum(math.prod(tensor.shape) for tensor in tensors) * self._precision.dtype.itemsize)
                return matrix.to(self.device)
            self.dequantized += [tensor.name for tensor in tensors if self._files.is_quantized(tensor.name)]
        return round_matrix(self.load(name), self._precision.quantization)


class RandomWeights:
    """Random parameters with a fixed seed, to measure an architecture without a checkpoint.

    They are drawn on the device, so devices of different types get different numbers.
    """

    def __init__(self, spec: DecoderSpec, precision: Precision, device: torch.device) -> None:
        self._shapes = dict(parameter_shapes(spec))
        self._ones = spec.norm != "rms_plus_one"
        self._precision, self.device = precision, device
        is_meta = device.type == "meta"  # where nothing is drawn, and there are no generators
        self._generator = None if is_meta else torch.Generator(device).manual_seed(0)

    def __contains__(self, name: str) -> bool:
        return name in self._shapes

    def load(self, name: str) -> Tensor:
        parts = self._shapes[name]
        shape = (sum(part[0] for part in parts), *parts[0][1:])
        values = torch.randn(shape, generator=self._generator, device=self.device).mul_(0.02)
        if self._ones and name.endswith("norm.weight"):
            values = values + 1
        return values.to(self._precision.dtype)

    def load_matrix(self, name: str) -> Weight:
        return round_matrix(self.load(name), self._precision.quantization)


@contextmanager
def load_weights(
    files: WeightFiles, tensors: TensorMap, precision: Precision, device: torch.device
) -> Iterator[Weights]:
    """Yield the parameters of a model, to be loaded within the block.

    They include a head if it differs from the embedding, even if the config says that it is tied. Raise ModelError
    naming a tensor of the wrong shape or type before any is loaded.
    """
    tensors = _untied_if_heads_differ(files, tensors)
    for source in tensors.sources.values():
        _check(files, source)
    if others := tensors.unused():
        more = f" and {len(others) - 5} more" if len(others) > 5 else ""
        logger.warning("tensors that the model has no place for are left out: %s%s", ", ".join(others[:5]), more)
    elements = sum(math.prod(tensor.shape) for source in tensors.sources.values() for tensor in source.tensors)
    with progress("loading weights", elements * precision.dtype.itemsize) as report:
        weights = CheckpointWeights(files, tensors.sources, precision, device, report)
        yield weights
    if names := weights.dequantized:
        reason = "matmuls take Q4_0, Q4_1, Q8_0, and groups of 32 inputs, the same in all parts of one matrix"
        logger.warning("%d tensors are dequantised, %s the first: %s", len(names), names[0], reason)


def round_matrix(matrix: Tensor, quantization: Quantization | None) -> Weight:
    """Return `matrix` (out, in), to be rounded to 8 or 4 bits if `quantization` says so and it has whole groups."""
    if quantization not in ("int8", "int4") or matrix.shape[1] % QUANT_GROUP_SIZE:
        return matrix
    return RoundedWeight(8 if quantization == "int8" else 4, [matrix])


def _check(files: WeightFiles, source: ParameterSource) -> None:
    for tensor in source.tensors:
        expected, stored = source.stored_shape(tensor), files.shape(tensor.name)
        if stored != expected:
            raise ModelError(f"tensor {tensor.name} has shape {list(stored)}, and config.json says {list(expected)}")
        check_float(tensor.name, files.dtype(tensor.name))


def _allocate(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> Tensor:
    """Return memory for one parameter. On a CPU, a large one is an anonymous mapping, which the system gets back whole.

    On the heap, allocations that outlive the parameter could leave a hole of its size.
    """
    size = math.prod(shape) * dtype.itemsize
    if device.type != "cpu" or size < _MIN_MAPPING:
        return torch.empty(shape, dtype=dtype, device=device)
    return torch.frombuffer(mmap(-1, size, flags=MAP_PRIVATE | MAP_ANONYMOUS), dtype=dtype).view(shape)


def _untied_if_heads_differ(files: WeightFiles, tensors: TensorMap) -> TensorMap:
    """Return `tensors`, untied if the checkpoint has a head that differs from the embedding, as in transformers."""
    separate = tensors.separate_head()
    if separate is None or _equal(*map(files.get, separate)):
        return tensors
    logger.warning("config.json says that the embeddings are tied, but %s is not %s: both are used", *separate)
    return tensors.untied()


def _equal(a: Tensor, b: Tensor) -> bool:
    """Return whether two matrices hold the same numbers, in any type. Compare a few rows at a time."""
    if a.shape != b.shape or not {a.dtype, b.dtype} <= set(FLOATS):
        return False
    dtype = torch.promote_types(a.dtype, b.dtype)
    pairs = zip(torch.split(a, _COMPARED_ROWS), torch.split(b, _COMPARED_ROWS), strict=True)
    return all(torch.equal(left.to(dtype), right.to(dtype)) for left, right in pairs)
