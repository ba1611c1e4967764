"""`load_weights`: loads the parameters of a checkpoint onto the device, one at a time.

A CPU's kernels pack matrices straight from the files, which are memory maps: one pass concatenates, converts or rounds,
and packs. For other devices, a parameter is allocated once, on the device and in its final type, and the checkpoint's
tensors are copied into it. The decoder packs each parameter before it loads the next one, so that no more than one
unpacked parameter is in memory. Every name and shape is checked: a model with a random or missing weight must not
start.
"""

import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import get_args

import torch
from torch import Tensor

from kernels.quantized import QUANT_GROUP_SIZE, FloatWeight, QuantizedWeight, RoundedWeight, Weight, stack
from kernels.table_weight import TableWeight
from services.worker.checkpoint.mapped_pages import release, will_need
from services.worker.checkpoint.quantization_config import CheckpointQuantization
from services.worker.checkpoint.weight_files import FLOATS, WeightFiles, check_float
from services.worker.models.decoder.layers import Weights
from services.worker.models.device_copy import copy_to
from services.worker.models.precision import Precision
from services.worker.models.spec import DecoderSpec, parameter_shapes
from services.worker.models.tensor_map import ParameterSource, TensorMap
from shared.errors import ModelError
from shared.hub.progress import progress

logger = logging.getLogger(__name__)

_READ_AHEAD = 2**28  # bytes of files: half a second of a fast disk
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
        self._pages = MappedPages(files, sources)
        self.dequantized: list[str] = []  # tensors whose format matmuls cannot use

    def __contains__(self, name: str) -> bool:
        return name in self._sources

    def load(self, name: str) -> Tensor:
        """Return the parameter called `name`. Raise ModelError naming a tensor that cannot be read."""
        self._pages.proceed_to(name)
        return self._copied(self._sources[name])

    def _copied(self, source: ParameterSource) -> Tensor:
        """Return the parameter on its device and in its type."""
        rows = sum(tensor.shape[0] for tensor in source.tensors)
        parameter = torch.empty((rows, *source.tensors[0].shape[1:]), dtype=self._precision.dtype, device=self.device)
        targets = torch.split(parameter, [tensor.shape[0] for tensor in source.tensors])
        self._copy(zip(targets, self._stored(source), strict=True))
        self._report(parameter.nbytes)
        return parameter

    def load_matrix(self, name: str) -> Weight:
        """Return the matrix called `name`: with the checkpoint's quants, to be rounded to quants, or as floats."""
        self._pages.proceed_to(name)
        source, precision = self._sources[name], self._precision
        if precision.quantization in get_args(CheckpointQuantization):
            matrix = _joined([self._files.get_quantized(tensor.name) for tensor in source.tensors])
            if matrix is not None:
                self._report(source.elements * precision.dtype.itemsize)
                return matrix.to(self.device)
            self.dequantized += [tensor.name for tensor in source.tensors if self._files.is_quantized(tensor.name)]
        if self.device.type != "cpu":
            return self._copied(source)
        self._report(source.elements * precision.dtype.itemsize)
        return float_matrix(list(self._stored(source)), precision)

    def _stored(self, source: ParameterSource) -> Iterator[Tensor]:
        """Yield the stored tensors that are the parts of a parameter."""
        for tensor in source.tensors:
            stored = self._files.get(tensor.name)
            if tensor.expert is not None:
                stored = stored[tensor.expert]
            yield stored.T if source.transposed else stored


class MappedPages:
    """The pages of mapped files that parameters are read from, in the order of `sources`."""

    def __init__(self, files: WeightFiles, sources: Mapping[str, ParameterSource]) -> None:
        self._files, self._sources = files, sources
        self._next = iter(sources.values())
        self._ahead = 0  # bytes that were asked for and not yet used
        self._current: list[Tensor] = []

    def proceed_to(self, name: str) -> None:
        """Release the pages of the last parameter, and read ahead of this one."""
        for mapped in self._current:
            release(mapped)
        self._current = self._mapped(self._sources[name])
        self._ahead -= sum(mapped.nbytes for mapped in self._current)
        while self._ahead < _READ_AHEAD and (source := next(self._next, None)):
            for mapped in self._mapped(source):
                will_need(mapped)
                self._ahead += mapped.nbytes

    def _mapped(self, source: ParameterSource) -> list[Tensor]:
        mapped: list[Tensor] = []
        for tensor in source.tensors:
            parts = self._files.mapped(tensor.name)
            mapped += parts if tensor.expert is None else [part[tensor.expert] for part in parts]
        return mapped


class RandomWeights:
    """Random parameters with a fixed seed, to measure an architecture without a checkpoint.

    They are drawn on the device, so devices of different types get different numbers. On a CPU, where drawing billions
    takes minutes, the rows of a matrix are windows of one row of numbers, each one number further than the last.
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
        values = self._draw(*self._shape(name))
        if self._ones and name.endswith("norm.weight"):
            values = values + 1
        return values.to(self._precision.dtype)

    def load_matrix(self, name: str) -> Weight:
        if self.device.type != "cpu":
            return self.load(name)
        outputs, inputs = self._shape(name)
        return float_matrix([self._draw(outputs + inputs - 1).unfold(0, inputs, 1)], self._precision)

    def _shape(self, name: str) -> tuple[int, ...]:
        parts = self._shapes[name]
        return (sum(part[0] for part in parts), *parts[0][1:])

    def _draw(self, *shape: int) -> Tensor:
        return torch.randn(shape, generator=self._generator, device=self.device).mul_(0.02)


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
    elements = sum(source.elements for source in tensors.sources.values())
    with progress("loading weights", elements * precision.dtype.itemsize) as report:
        weights = CheckpointWeights(files, tensors.sources, precision, device, report)
        yield weights
    if names := weights.dequantized:
        reason = "matmuls take Q4_0, Q4_1, Q8_0, groups of 32 inputs, and tables, the same in all parts of one matrix"
        logger.warning("%d tensors are dequantised, %s the first: %s", len(names), names[0], reason)


def float_matrix(parts: Sequence[Tensor], precision: Precision) -> FloatWeight | RoundedWeight:
    """Return the matrix with the outputs of all `parts` (out, in), to be rounded to 8 or 4 bits if `precision` says so
    and it has whole groups.
    """
    parts = [part.float() if part.dtype == torch.float64 else part for part in parts]  # kernels take no float64
    if precision.quantization not in ("int8", "int4") or parts[0].shape[1] % QUANT_GROUP_SIZE:
        return FloatWeight(precision.dtype, parts)
    return RoundedWeight(8 if precision.quantization == "int8" else 4, parts)


def _joined(parts: Sequence[QuantizedWeight | TableWeight | None]) -> QuantizedWeight | TableWeight | None:
    """Return one weight with the outputs of all `parts`; None if matmuls cannot use it."""
    tables = [part for part in parts if isinstance(part, TableWeight)]
    if tables and len(tables) == len(parts):
        return TableWeight([inner for part in tables for inner in part.parts])
    quantized = [part for part in parts if isinstance(part, QuantizedWeight)]
    return stack(quantized) if len(quantized) == len(parts) else None


def _check(files: WeightFiles, source: ParameterSource) -> None:
    for tensor in source.tensors:
        expected, stored = source.stored_shape(tensor), files.shape(tensor.name)
        if stored != expected:
            raise ModelError(f"tensor {tensor.name} has shape {list(stored)}, and config.json says {list(expected)}")
        check_float(tensor.name, files.dtype(tensor.name))


def _untied_if_heads_differ(files: WeightFiles, tensors: TensorMap) -> TensorMap:
    """Return `tensors`, untied if the checkpoint has a head that differs from the embedding, as in transformers."""
    separate = tensors.separate_head()
    if separate is None or _equal(*map(files.get, separate)):
        for mapped in files.mapped(separate[0]) if separate else ():
            release(mapped)  # nothing else reads it, and so nothing else would release it
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
