"""`load_weights`: the parameters of a checkpoint on the device, one at a time.

A parameter's memory is taken once, in its final type and place, and the checkpoint's tensors are copied into their
parts of it: fusing, converting and moving are one pass. It is made when the decoder asks for it, which packs it and
lets it go, so that beside the model itself no more than one parameter is in memory. Every name and shape is checked:
a model with a random or missing weight must not start.
"""

import logging
import math
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from mmap import MAP_ANONYMOUS, MAP_PRIVATE, mmap
from typing import get_args

import torch
from torch import Tensor

from kernels.quantized import QUANT_GROUP_SIZE, QuantizedWeight, quantize, stack
from services.worker.checkpoint.quantization_config import CheckpointQuantization
from services.worker.checkpoint.weight_files import FLOATS, WeightFiles, check_float
from services.worker.models.decoder.layers import Weights
from services.worker.models.precision import Precision, Quantization
from services.worker.models.spec import DecoderSpec, parameter_shapes
from services.worker.models.tensor_map import ParameterSource, TensorMap
from shared.errors import ModelError
from shared.hub.progress import progress

log = logging.getLogger(__name__)

_LARGE = 2**16  # bytes
_ROWS = 256  # that are compared at once


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
        self._report = report  # takes the bytes that were read, as floats
        self.dequantized: list[str] = []  # tensors whose quants are of no use to matmuls

    def __contains__(self, name: str) -> bool:
        return name in self._sources

    def load(self, name: str) -> Tensor:
        """Return the parameter called `name`. Raise ModelError naming a tensor that cannot be read."""
        source = self._sources[name]
        rows = sum(tensor.shape[0] for tensor in source.tensors)
        parameter = _allocate((rows, *source.tensors[0].shape[1:]), self._precision.dtype, self.device)
        row = 0
        for tensor in source.tensors:
            stored = self._files.get(tensor.name)
            if tensor.expert is not None:
                stored = stored[tensor.expert]
            parameter[row : row + tensor.shape[0]].copy_(stored.T if source.transposed else stored)
            row += tensor.shape[0]
        self._report(parameter.nbytes)
        return parameter

    def load_matrix(self, name: str) -> Tensor | QuantizedWeight:
        """Return the matrix called `name`, quantised if the precision is: the checkpoint's own quants, or rounded."""
        if self._precision.quantization in get_args(CheckpointQuantization):
            tensors = self._sources[name].tensors
            stored = [self._files.get_quantized(tensor.name) for tensor in tensors]
            matrix = stack([part for part in stored if part is not None]) if all(stored) else None
            if matrix is not None:
                self._report(sum(math.prod(tensor.shape) for tensor in tensors) * self._precision.dtype.itemsize)
                return matrix
            self.dequantized += [tensor.name for tensor in tensors if self._files.is_quantized(tensor.name)]
        return round_matrix(self.load(name), self._precision.quantization)


class RandomWeights:
    """Parameters drawn from a fixed seed, for measuring a shape without its checkpoint."""

    def __init__(self, spec: DecoderSpec, precision: Precision, device: torch.device) -> None:
        self._shapes = dict(parameter_shapes(spec))
        self._ones = spec.norm != "rms_plus_one"
        self._precision, self.device = precision, device
        self._generator = torch.Generator().manual_seed(0)

    def __contains__(self, name: str) -> bool:
        return name in self._shapes

    def load(self, name: str) -> Tensor:
        parts = self._shapes[name]
        shape = (sum(part[0] for part in parts), *parts[0][1:])
        values = torch.randn(shape, generator=self._generator).mul_(0.02)
        if self._ones and name.endswith("norm.weight"):
            values = values + 1
        return values.to(self.device, self._precision.dtype)

    def load_matrix(self, name: str) -> Tensor | QuantizedWeight:
        return round_matrix(self.load(name), self._precision.quantization)


@contextmanager
def load_weights(
    files: WeightFiles, tensors: TensorMap, precision: Precision, device: torch.device
) -> Iterator[Weights]:
    """Give the parameters of a model, to be loaded within the block; a head too, where it is not the table.

    Raise ModelError naming a tensor that has the wrong shape or type, before memory is taken for any.
    """
    tensors = _untied_if_heads_differ(files, tensors)
    for source in tensors.sources.values():
        _check(files, source)
    if others := tensors.unused():
        more = f" and {len(others) - 5} more" if len(others) > 5 else ""
        log.warning("tensors that the model has no place for are left out: %s%s", ", ".join(others[:5]), more)
    elements = sum(math.prod(tensor.shape) for source in tensors.sources.values() for tensor in source.tensors)
    with progress("loading weights", elements * precision.dtype.itemsize) as report:
        weights = CheckpointWeights(files, tensors.sources, precision, device, report)
        yield weights
    if names := weights.dequantized:
        reason = "matmuls take Q4_0, Q4_1, Q8_0, and groups of 32 inputs, the same in all parts of one matrix"
        log.warning("%d tensors are dequantised, %s the first: %s", len(names), names[0], reason)


def round_matrix(matrix: Tensor, quantization: Quantization | None) -> Tensor | QuantizedWeight:
    """Return `matrix` (out, in) in 8 or 4 bits, if `quantization` says so and its inputs make whole groups."""
    if quantization not in ("int8", "int4") or matrix.shape[1] % QUANT_GROUP_SIZE:
        return matrix
    return quantize(matrix, 8 if quantization == "int8" else 4)


def _check(files: WeightFiles, source: ParameterSource) -> None:
    for tensor in source.tensors:
        expected, stored = source.stored_shape(tensor), files.shape(tensor.name)
        if stored != expected:
            raise ModelError(f"tensor {tensor.name} has shape {list(stored)}, and config.json says {list(expected)}")
        check_float(tensor.name, files.dtype(tensor.name))


def _allocate(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> Tensor:
    """Return memory for one parameter. On a CPU a large one is a mapping of its own, which the system gets back whole.

    From the heap, whatever outlives a parameter that was packed and let go would leave a hole of its size.
    """
    size = math.prod(shape) * dtype.itemsize
    if device.type != "cpu" or size < _LARGE:
        return torch.empty(shape, dtype=dtype, device=device)
    return torch.frombuffer(mmap(-1, size, flags=MAP_PRIVATE | MAP_ANONYMOUS), dtype=dtype).view(shape)


def _untied_if_heads_differ(files: WeightFiles, tensors: TensorMap) -> TensorMap:
    """Return `tensors`, untied if the checkpoint has a head that is not the table, as transformers loads it."""
    separate = tensors.separate_head()
    if separate is None or _equal(*map(files.get, separate)):
        return tensors
    log.warning("config.json says that the embeddings are tied, but %s is not %s: both are used", *separate)
    return tensors.untied()


def _equal(a: Tensor, b: Tensor) -> bool:
    """Tell if two matrices hold the same numbers, of whatever types. Compare a few rows at a time."""
    if a.shape != b.shape or not {a.dtype, b.dtype} <= set(FLOATS):
        return False
    dtype = torch.promote_types(a.dtype, b.dtype)
    pairs = zip(torch.split(a, _ROWS), torch.split(b, _ROWS), strict=True)
    return all(torch.equal(left.to(dtype), right.to(dtype)) for left, right in pairs)
