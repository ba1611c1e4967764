"""From a checkpoint to weights on the device, one parameter at a time.

A parameter's memory is taken once, in its final type and place, and the checkpoint's tensors are copied into their
parts of it: fusing, converting and moving are one pass. It is made when the decoder asks for it, which packs it and
lets it go, so that beside the model itself no more than one parameter is in memory. Every name and shape is checked:
a model with a random or missing weight must not start.
"""

import itertools
import logging
import math
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from mmap import MAP_ANONYMOUS, MAP_PRIVATE, mmap
from pathlib import Path
from typing import get_args

import torch
from msgspec.structs import replace
from torch import Tensor

from kernels.quantized import QUANT_GROUP_SIZE, QuantizedWeight, quantize, stack
from services.worker.checkpoint.config_json import UnsupportedByFamily
from services.worker.checkpoint.weight_files import FLOATS, WeightFiles, refuse_codes
from services.worker.models.decoder.layers import Weights
from services.worker.models.precision import Precision, Quantization, Stored
from services.worker.models.spec import DecoderSpec, WeightNames, parameters
from services.worker.models.tensor_names import TensorNames
from services.worker.models.weight_sources import Part, Source, list_sources
from shared.errors import ModelError
from shared.hub.progress import progress

log = logging.getLogger(__name__)

_LARGE = 2**16  # bytes
_ROWS = 256  # that are compared at once
_COUNTED = 1000  # missing tensors; a wrong number of layers or experts may make it millions


class CheckpointWeights:
    """The parameters of a checkpoint, read as they are taken."""

    def __init__(
        self,
        files: WeightFiles,
        sources: Mapping[str, Source],
        precision: Precision,
        device: torch.device,
        done: Callable[[int], object],
    ) -> None:
        self._files, self._sources = files, sources
        self._precision, self.device = precision, device
        self._done = done  # told of the bytes that were read, as floats
        self.dequantised: list[str] = []  # tensors whose codes are of no use to the products

    def __contains__(self, name: str) -> bool:
        return name in self._sources

    def take(self, name: str) -> Tensor:
        """Raises ModelError naming a tensor that cannot be read."""
        source = self._sources[name]
        rows = sum(part.shape[0] for part in source.parts)
        whole = _allocate((rows, *source.parts[0].shape[1:]), self._precision.dtype, self.device)
        row = 0
        for tensor, shape, expert, _ in source.parts:
            stored = self._files.get(tensor)
            if expert is not None:
                stored = stored[expert]
            whole[row : row + shape[0]].copy_(stored.T if source.transposed else stored)
            row += shape[0]
        self._done(whole.nbytes)
        return whole

    def take_matrix(self, name: str) -> Tensor | QuantizedWeight:
        """As `take`, in few bits if that is wanted: the checkpoint's own, or rounded."""
        wanted = self._precision.quantization
        if wanted in get_args(Stored):
            tensors = [part.tensor for part in self._sources[name].parts]
            parts = [self._files.get_quantized(tensor) for tensor in tensors]
            found = stack([part for part in parts if part is not None]) if all(parts) else None
            if found is not None:
                self._done(found.quants.numel() * self._precision.dtype.itemsize)
                return found
            self.dequantised += [tensor for tensor in tensors if self._files.is_quantized(tensor)]
        return rounded(self.take(name), wanted)


class RandomWeights:
    """Weights drawn from a fixed seed, for measuring a shape without its checkpoint."""

    def __init__(self, spec: DecoderSpec, precision: Precision, device: torch.device) -> None:
        self._shapes = dict(parameters(spec))
        self._ones = spec.norm != "rms_plus_one"
        self._precision, self.device = precision, device
        self._generator = torch.Generator().manual_seed(0)

    def __contains__(self, name: str) -> bool:
        return name in self._shapes

    def take(self, name: str) -> Tensor:
        parts = self._shapes[name]
        shape = (sum(part[0] for part in parts), *parts[0][1:])
        drawn = torch.randn(shape, generator=self._generator).mul_(0.02)
        return (drawn + 1 if self._ones and name.endswith("norm.weight") else drawn).to(
            self.device, self._precision.dtype
        )

    def take_matrix(self, name: str) -> Tensor | QuantizedWeight:
        return rounded(self.take(name), self._precision.quantization)


@contextmanager
def load_weights(
    files: WeightFiles, spec: DecoderSpec, names: WeightNames, precision: Precision, device: torch.device
) -> Iterator[Weights]:
    """All of `parameters(spec)`, to be taken within the block; a head too, where there is one that is not the table.

    Raises ModelError naming a tensor that is missing, or has the wrong shape or type, before memory is taken for any.
    """
    where = TensorNames(files.names, names, tied=spec.tied)
    _refuse_missing(files, spec, names, where)
    sources = dict(list_sources(files, _untied(files, spec, where), names, where))
    for source in sources.values():
        _check(files, source)
    _warn_of_others(sources, where)
    elements = sum(math.prod(part.shape) for source in sources.values() for part in source.parts)
    with progress("loading weights", elements * precision.dtype.itemsize) as done:
        weights = CheckpointWeights(files, sources, precision, device, done)
        yield weights
    if wide := weights.dequantised:
        why = "products take Q4_0, Q4_1, Q8_0, and groups of 32 inputs, the same in all parts of one product"
        log.warning("%d tensors are dequantised, %s the first: %s", len(wide), wide[0], why)


def rounded(weight: Tensor, quantization: Quantization | None) -> Tensor | QuantizedWeight:
    """`weight` (out, in) in 8 or 4 bits, where that is wanted and its inputs make whole groups."""
    if quantization not in ("int8", "int4") or weight.shape[1] % QUANT_GROUP_SIZE:
        return weight
    return quantize(weight, 8 if quantization == "int8" else 4)


def refuse_missing(files: WeightFiles, spec: DecoderSpec, names: WeightNames) -> None:
    """Raise ModelError naming the first tensor that the model needs and the checkpoint lacks.

    It is an UnsupportedByFamily if the checkpoint has as many numbers for which the family knows no place: they may be
    the same weights under names that it does not know. No tensor is read.
    """
    _refuse_missing(files, spec, names, TensorNames(files.names, names, tied=spec.tied))


def _refuse_missing(files: WeightFiles, spec: DecoderSpec, names: WeightNames, where: TensorNames) -> None:
    absent = (part for part in _parts(files, spec, names, where) if part.tensor not in files)
    found = [part.tensor for part in itertools.islice(absent, _COUNTED + 1)]
    if missing := list(dict.fromkeys(found)):  # one may hold all experts
        others = "many" if len(found) > _COUNTED else len(missing) - 1
        kind = UnsupportedByFamily if _may_be_renamed(files, spec, names, where) else ModelError
        raise kind(f"tensor {missing[0]} is missing" + (f" (and {others} more)" if others else ""))


def _may_be_renamed(files: WeightFiles, spec: DecoderSpec, names: WeightNames, where: TensorNames) -> bool:
    """Return whether the tensors without a place in the model have as many elements as the missing ones."""
    total = sum(math.prod(files.shape(name)) for name in files.names)
    used: set[str] = set()
    needed = 0
    for part in _parts(files, spec, names, where):
        if part.tensor in files:
            used.add(part.tensor)
        else:
            needed += math.prod(part.shape)
        if needed > total:  # a wrong number of layers would have us count for long
            return False
    return needed <= sum(math.prod(files.shape(name)) for name in where.others(used))


def _check(files: WeightFiles, source: Source) -> None:
    for part in source.parts:
        expected, stored = source.stored_shape(part), files.shape(part.tensor)
        if stored != expected:
            raise ModelError(f"tensor {part.tensor} has shape {list(stored)}, and config.json says {list(expected)}")
        refuse_codes(part.tensor, files.dtype(part.tensor))


def _allocate(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> Tensor:
    """Memory for one parameter. On a CPU a large one is a mapping of its own, which the system gets back in whole.

    From the heap, whatever outlives a parameter that was packed and let go would leave a hole of its size.
    """
    size = math.prod(shape) * dtype.itemsize
    if device.type != "cpu" or size < _LARGE:
        return torch.empty(shape, dtype=dtype, device=device)
    return torch.frombuffer(mmap(-1, size, flags=MAP_PRIVATE | MAP_ANONYMOUS), dtype=dtype).view(shape)


def _untied(files: WeightFiles, spec: DecoderSpec, where: TensorNames) -> DecoderSpec:
    """Return the spec, not tied if the checkpoint has a head that is not the table, as transformers loads it."""
    head, table = where.find(where.head), where.find(where.embedding)
    if not spec.tied or where.head not in where or head == table or _equal(files.get(head), files.get(table)):
        return spec
    log.warning("config.json says that the embeddings are tied, but %s is not %s: both are used", head, table)
    return replace(spec, tied=False)


def _equal(a: Tensor, b: Tensor) -> bool:
    """Return whether two matrices hold the same numbers, of whatever types. It compares a few rows at a time."""
    if a.shape != b.shape or not {a.dtype, b.dtype} <= set(FLOATS):
        return False
    kind = torch.promote_types(a.dtype, b.dtype)
    pairs = zip(torch.split(a, _ROWS), torch.split(b, _ROWS), strict=True)
    return all(torch.equal(left.to(kind), right.to(kind)) for left, right in pairs)


def _parts(files: WeightFiles, spec: DecoderSpec, names: WeightNames, where: TensorNames) -> Iterator[Part]:
    return (part for _, source in list_sources(files, spec, names, where) for part in source.parts)


def _warn_of_others(sources: Mapping[str, Source], where: TensorNames) -> None:
    used = {part.tensor for source in sources.values() for part in source.parts}
    others = [name for name in where.others(used) if name != where.find(where.head)]  # a copy of the table, if not used
    if others:
        more = f" and {len(others) - 5} more" if len(others) > 5 else ""
        log.warning("tensors that the model has no place for are left out: %s%s", ", ".join(others[:5]), more)


def checkpoint_dtype(folder: Path, files: WeightFiles) -> torch.dtype:
    """The type that most of a checkpoint's floating-point tensors are stored in; float32 if there are none."""
    if not files.names:
        raise ModelError(f"{folder}: the weight files hold no tensors")
    counts = Counter(dtype for name in files.names if (dtype := files.dtype(name)) in FLOATS)
    return counts.most_common(1)[0][0] if counts else torch.float32
