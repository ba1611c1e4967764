"""`load_weights`: loads the parameters of a checkpoint onto the device, one at a time.

A CPU's kernels pack matrices straight from the files, which are memory maps: one pass concatenates, converts or rounds,
and packs. For other devices, a parameter is allocated once, on the device and in its final type, and the checkpoint's
tensors are copied into it. The decoder packs each parameter before it loads the next one, so that no more than one
unpacked parameter is in memory. Every name and shape is checked: a model with a random or missing weight must not
start.
"""

import logging
import math
import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import get_args

import torch
from torch import Tensor

from kernels.gguf_weight import GGUFWeight
from kernels.quantized import (
    QUANT_GROUP_SIZE,
    FloatWeight,
    QuantizedWeight,
    RoundedWeight,
    Rows,
    StackedWeight,
    Weight,
    row_blocks,
    stack,
)
from kernels.table_weight import TableWeight
from services.worker.checkpoint.mapped_pages import release, will_need
from services.worker.checkpoint.quantization_config import CheckpointQuantization
from services.worker.checkpoint.weight_files import FLOATS, WeightFiles, check_float, warn_of_unused
from services.worker.models.decoder.layers import Weights
from services.worker.models.device_copy import copy_to
from services.worker.models.precision import Precision
from services.worker.models.share import Share
from services.worker.models.spec import DecoderSpec, parameter_shapes
from services.worker.models.tensor_map import ParameterSource, Piece, TensorMap, concatenated_shape
from services.worker.parallel_config import ONE_RANK, ParallelConfig
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
        sources: Mapping[str, Sequence[Piece]],
        precision: Precision,
        device: torch.device,
        report: Callable[[str], object],
    ) -> None:
        self._files, self._sources = files, sources
        self._precision, self.device, self.dtype = precision, device, precision.dtype
        self._copy = copy_to(device)
        self._report = report  # called with the name of each loaded parameter
        self._pages = MappedPages(files, sources)
        self.dequantized: list[str] = []  # tensors whose format matmuls cannot use

    def __contains__(self, name: str) -> bool:
        return name in self._sources

    def load(self, name: str) -> Tensor:
        """Return the parameter called `name`. Raise ModelError naming a tensor that cannot be read."""
        self._pages.proceed_to(name)
        parameter = self._copied(self._sources[name])
        self._report(name)
        return parameter

    def _copied(self, pieces: Sequence[Piece]) -> Tensor:
        """Return the parameter on its device and in its type."""
        rows = [piece.shape[0] for piece in pieces]
        parameter = torch.empty((sum(rows), *pieces[0].shape[1:]), dtype=self.dtype, device=self.device)
        self._copy(
            (target[first : first + len(block)], block)
            for target, part in zip(torch.split(parameter, rows), self._stored(pieces), strict=True)
            for first, (block,) in row_blocks([part])
        )
        return parameter

    def load_matrix(self, name: str) -> Weight:
        """Return the matrix called `name`: with the checkpoint's quants, to be rounded to quants, or as floats."""
        self._pages.proceed_to(name)
        matrix = self._matrix(self._sources[name])
        self._report(name)
        return matrix

    def _matrix(self, pieces: Sequence[Piece]) -> Weight:
        if self._precision.quantization in get_args(CheckpointQuantization):
            matrix = _joined([self._files.get_quantized(piece.name, piece.region) for piece in pieces])
            if matrix is not None:
                return matrix.to(self.device)
            self.dequantized += [piece.name for piece in pieces if self._files.is_quantized(piece.name)]
        if self.device.type != "cpu":
            return self._copied(pieces)
        return float_matrix(list(self._stored(pieces)), self._precision)

    def _stored(self, pieces: Sequence[Piece]) -> Iterator[Rows]:
        """Yield the pieces of a parameter, as they are stored or to be dequantised."""
        for piece in pieces:
            if (rows := self._files.dequantized_rows(piece.name, piece.region)) is not None:
                yield rows
                continue
            stored = self._files.get(piece.name, piece.stored)
            if stored.ndim > len(piece.region):  # one of a stack of experts
                stored = stored[0]
            yield stored.T if piece.transposed else stored


class MappedPages:
    """The pages of mapped files that parameters are read from, in the order of `sources`."""

    def __init__(self, files: WeightFiles, sources: Mapping[str, Sequence[Piece]]) -> None:
        self._files, self._sources = files, sources
        self._next = iter(sources.values())
        self._ahead = 0  # bytes that were asked for and not yet used
        self._current: Sequence[Piece] = ()

    def proceed_to(self, name: str) -> None:
        """Release the pages of the last parameter, and read ahead of this one."""
        for tensor in dict.fromkeys(piece.name for piece in self._current):
            for mapped in self._files.mapped(tensor):  # all of it: the system may have mapped what lies beside a piece
                release(mapped)
        self._current = self._sources[name]
        self._ahead -= sum(mapped.nbytes for mapped in self._mapped(self._current))
        while self._ahead < _READ_AHEAD and (source := next(self._next, None)):
            for mapped in self._mapped(source):
                will_need(mapped)
                self._ahead += mapped.nbytes

    def _mapped(self, pieces: Sequence[Piece]) -> list[Tensor]:
        return [mapped for piece in pieces for mapped in self._files.mapped(piece.name, piece.stored)]


class RandomWeights:
    """Random parameters with fixed seeds, to measure an architecture without a checkpoint.

    A parameter's seed is that of its name, and a rank has its part of the same numbers that one alone would have. They
    are drawn on the device, so devices of different types get different numbers. On a CPU, where drawing billions takes
    minutes, the rows of a matrix are windows of one row of numbers, each one number further than the last.
    """

    def __init__(
        self,
        spec: DecoderSpec,
        precision: Precision,
        device: torch.device,
        parallel: ParallelConfig = ONE_RANK,
    ) -> None:
        share, parameters = Share(spec, parallel), dict(parameter_shapes(spec))
        own = {name: (parameters[name], share.regions(parameters[name])) for name in share.parameters(parameters)}
        self._parameters = {name: parameter for name, parameter in own.items() if parameter[1]}
        self._ones = spec.norm != "rms_plus_one"
        self._precision, self.device, self.dtype = precision, device, precision.dtype
        is_meta = device.type == "meta"  # where nothing is drawn, and there are no generators
        self._generator = None if is_meta else torch.Generator(device)

    def __contains__(self, name: str) -> bool:
        return name in self._parameters

    def load(self, name: str) -> Tensor:
        parts, regions = self._parameters[name]
        values = self._draw(name, *concatenated_shape(parts))
        if self._ones and name.endswith("norm.weight"):
            values = values + 1
        own = [values[region] for region in regions]
        parameter = torch.empty((sum(map(len, own)), *own[0].shape[1:]), dtype=self.dtype, device=self.device)
        for target, part in zip(torch.split(parameter, [len(part) for part in own]), own, strict=True):
            target.copy_(part)
        return parameter

    def load_matrix(self, name: str) -> Weight:
        if self.device.type != "cpu":
            return self.load(name)
        parts, regions = self._parameters[name]
        outputs, inputs = concatenated_shape(parts)
        values = self._draw(name, outputs + inputs - 1).bfloat16().unfold(0, inputs, 1)  # as checkpoints are stored
        return float_matrix([values[region] for region in regions], self._precision)

    def _draw(self, name: str, *shape: int) -> Tensor:
        if self._generator:
            self._generator.manual_seed(zlib.crc32(name.encode()))
        return torch.randn(shape, generator=self._generator, device=self.device).mul_(0.02)


@contextmanager
def load_weights(
    files: WeightFiles,
    tensors: TensorMap,
    precision: Precision,
    device: torch.device,
    parallel: ParallelConfig = ONE_RANK,
) -> Iterator[Weights]:
    """Yield what a rank has of the parameters of a model, to be loaded within the block.

    They include a head if it differs from the embedding, even if the config says that it is tied. Raise ModelError
    naming a tensor of the wrong shape or type before any is loaded, whichever rank has it.
    """
    tensors = _untied_if_heads_differ(files, tensors)
    for source in tensors.sources.values():
        _check(files, source)
    warn_of_unused(tensors.unused())
    share = Share(tensors.spec, parallel)
    sources = {name: tensors.sources[name].pieces(share) for name in share.parameters(tensors.sources)}
    sources = {name: pieces for name, pieces in sources.items() if pieces}
    for name, pieces in sources.items():
        _refuse_broken_groups(files, tensors.sources[name], pieces, precision)
    sizes = {name: _stored_size(files, pieces) for name, pieces in sources.items()}
    with progress("loading weights", sum(sizes.values())) as report:
        weights = CheckpointWeights(files, sources, precision, device, lambda name: report(sizes[name]))
        yield weights
    if names := weights.dequantized:
        kinds = "GGUF's Q2_K to Q8_0, IQ4_NL and IQ4_XS, groups of 32 inputs, and tables"
        reason = f"matmuls take {kinds}, of one kind in all parts of a matrix"
        logger.warning("%d tensors are dequantised, %s the first: %s", len(names), names[0], reason)


def float_matrix(parts: Sequence[Rows], precision: Precision) -> FloatWeight | RoundedWeight:
    """Return the matrix with the outputs of all `parts` (out, in), to be rounded to 8 or 4 bits if `precision` says so
    and it has whole groups.
    """
    if precision.quantization not in ("int8", "int4") or parts[0].shape[1] % QUANT_GROUP_SIZE:
        return FloatWeight(precision.dtype, parts)
    return RoundedWeight(8 if precision.quantization == "int8" else 4, parts)


def _joined(
    parts: Sequence[QuantizedWeight | GGUFWeight | TableWeight | None],
) -> QuantizedWeight | StackedWeight | GGUFWeight | TableWeight | None:
    """Return one weight with the outputs of all `parts`; None if matmuls cannot use it."""
    tables = [part for part in parts if isinstance(part, TableWeight)]
    if tables and len(tables) == len(parts):
        return TableWeight([inner for part in tables for inner in part.parts])
    blocks = [part for part in parts if isinstance(part, GGUFWeight)]
    if blocks and len(blocks) == len(parts):
        return GGUFWeight([inner for part in blocks for inner in part.parts])
    quantized = [part for part in parts if isinstance(part, QuantizedWeight)]
    return stack(quantized) if len(quantized) == len(parts) else None


def _stored_size(files: WeightFiles, pieces: Sequence[Piece]) -> int:
    """Return the bytes that `pieces` have in their files; of a file that is not mapped, as if it held floats only."""
    size = 0
    for piece in pieces:
        mapped = files.mapped(piece.name, piece.stored)
        floats = 0 if mapped else math.prod(piece.shape)
        size += sum(part.nbytes for part in mapped) + floats * files.dtype(piece.name).itemsize
    return size


def _check(files: WeightFiles, source: ParameterSource) -> None:
    for tensor in source.tensors:
        expected, stored = source.stored_shape(tensor), files.shape(tensor.name)
        if stored != expected:
            raise ModelError(f"tensor {tensor.name} has shape {list(stored)}, and config.json says {list(expected)}")
        check_float(tensor.name, files.dtype(tensor.name))


def _refuse_broken_groups(
    files: WeightFiles, source: ParameterSource, pieces: Sequence[Piece], precision: Precision
) -> None:
    """Raise ModelError naming a quantised matrix, or one that will be, of whose inputs a rank has no whole groups."""
    if not precision.quantization or len(pieces[0].shape) == 1:
        return
    whole, own = source.tensors[0].shape[1], pieces[0].shape[1]
    for tensor in source.tensors:
        is_quantized = precision.quantization in ("int8", "int4") or files.is_quantized(tensor.name)
        if is_quantized and own % QUANT_GROUP_SIZE and whole % QUANT_GROUP_SIZE == 0:
            raise ModelError(
                f"tensor {tensor.name}: a rank's {own} of {whole} inputs are not whole groups of {QUANT_GROUP_SIZE}, "
                f"as {precision.name} needs them: try a smaller --tensor-parallel-size"
            )


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
