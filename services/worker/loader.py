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
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from mmap import MAP_ANONYMOUS, MAP_PRIVATE, mmap
from pathlib import Path
from typing import get_args

import torch
from torch import Tensor

from kernels.quantized import GROUP, QuantizedWeight, quantize, stack
from services.worker.models.layers import Weights
from services.worker.models.spec import DecoderSpec, WeightNames, parameters
from services.worker.precision import Precision, Quantization, Stored
from services.worker.weight_files import FLOATS, WeightFiles, refuse_codes
from shared.errors import ModelError
from shared.progress import progress

log = logging.getLogger(__name__)

_LARGE = 2**16  # bytes
_COUNTED = 1000  # missing tensors; a wrong number of layers or experts may make it millions

Part = tuple[str, tuple[int, ...]]  # (tensor of the checkpoint, its shape as our parameters have it)


@dataclass(frozen=True)
class Source:
    """Where a parameter comes from: tensors that are stacked along the first dimension."""

    parts: list[Part]
    transposed: bool = False  # the checkpoint has them the other way round


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
        rows = sum(shape[0] for _, shape in source.parts)
        whole = _allocate((rows, *source.parts[0][1][1:]), self._precision.dtype, self.device)
        row = 0
        for tensor, shape in source.parts:
            stored = self._files.get(tensor)
            whole[row : row + shape[0]].copy_(stored.T if source.transposed else stored)
            row += shape[0]
        self._done(whole.nbytes)
        return whole

    def take_matrix(self, name: str) -> Tensor | QuantizedWeight:
        """As `take`, in few bits if that is wanted: the checkpoint's own, or rounded."""
        wanted = self._precision.quantization
        if wanted in get_args(Stored):
            tensors = [tensor for tensor, _ in self._sources[name].parts]
            parts = [self._files.get_quantized(tensor) for tensor in tensors]
            found = stack([part for part in parts if part is not None]) if all(parts) else None
            if found is not None:
                self._done(found.codes.numel() * self._precision.dtype.itemsize)
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
    """All of `parameters(spec)`, to be taken within the block.

    Raises ModelError naming a tensor that is missing, or has the wrong shape or type, before memory is taken for any.
    """
    _refuse_missing(files, _sources(files, spec, names))
    sources = dict(_sources(files, spec, names))
    for source in sources.values():
        _check(files, source)
    _warn_of_others(files, sources, names)
    elements = sum(math.prod(shape) for source in sources.values() for _, shape in source.parts)
    with progress("loading weights", elements * precision.dtype.itemsize) as done:
        weights = CheckpointWeights(files, sources, precision, device, done)
        yield weights
    if wide := weights.dequantised:
        why = "products take Q4_0, Q4_1, Q8_0, and groups of 32 inputs, the same in all parts of one product"
        log.warning("%d tensors are dequantised, %s the first: %s", len(wide), wide[0], why)


def rounded(weight: Tensor, quantization: Quantization | None) -> Tensor | QuantizedWeight:
    """`weight` (out, in) in 8 or 4 bits, where that is wanted and its inputs make whole groups."""
    if quantization not in ("int8", "int4") or weight.shape[1] % GROUP:
        return weight
    return quantize(weight, 8 if quantization == "int8" else 4)


def _refuse_missing(files: WeightFiles, sources: Iterable[tuple[str, Source]]) -> None:
    absent = (name for _, source in sources for name, _ in source.parts if name not in files)
    missing = list(itertools.islice(absent, _COUNTED + 1))
    if missing:
        others = "many" if len(missing) > _COUNTED else len(missing) - 1
        raise ModelError(f"tensor {missing[0]} is missing" + (f" (and {others} more)" if others else ""))


def _check(files: WeightFiles, source: Source) -> None:
    for name, shape in source.parts:
        expected, stored = shape[::-1] if source.transposed else shape, files.shape(name)
        if stored != expected:
            raise ModelError(f"tensor {name} has shape {list(stored)}, and config.json says {list(expected)}")
        refuse_codes(name, files.dtype(name))


def _allocate(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> Tensor:
    """Memory for one parameter. On a CPU a large one is a mapping of its own, which the system gets back in whole.

    From the heap, whatever outlives a parameter that was packed and let go would leave a hole of its size.
    """
    size = math.prod(shape) * dtype.itemsize
    if device.type != "cpu" or size < _LARGE:
        return torch.empty(shape, dtype=dtype, device=device)
    return torch.frombuffer(mmap(-1, size, flags=MAP_PRIVATE | MAP_ANONYMOUS), dtype=dtype).view(shape)


def _sources(files: WeightFiles, spec: DecoderSpec, names: WeightNames) -> Iterator[tuple[str, Source]]:
    """Each parameter, and the tensors that make it."""
    anchor = names.modules["embedding"] + ".weight"
    prefix = next((prefix for prefix in names.prefixes if prefix + anchor in files), names.prefixes[0])
    for parameter, shapes in parameters(spec):
        module, kind = parameter.rsplit(".", 1)
        modules, transposed = _modules(module, names, prefix)
        if len(modules) == 1:  # on disk they are stacked already
            shapes = [(sum(shape[0] for shape in shapes), *shapes[0][1:])]
        parts = [(f"{name}.{kind}", shape) for name, shape in zip(modules, shapes, strict=True)]
        transposed = transposed and kind == "weight" and not files.outputs_first(parts[0][0])
        yield parameter, Source(parts, transposed)


def _modules(module: str, names: WeightNames, prefix: str) -> tuple[tuple[str, ...], bool]:
    """The checkpoint's modules of one of ours, and whether their weights are transposed."""
    match module.split("."):
        case ["head"]:
            return (names.head,), False
        case ["layers", layer, *path]:
            number = path[1] if len(path) == 3 else ""  # experts, which one, what of it
            part = ".".join(step for step in path if not step.isdecimal())
            start = prefix + names.layer.format(layer)
            return tuple(start + name.format(number) for name in names.layer_modules[part]), part in names.transposed
        case _:
            return (prefix + names.modules[module],), False


def _warn_of_others(files: WeightFiles, sources: Mapping[str, Source], names: WeightNames) -> None:
    used = {name for source in sources.values() for name, _ in source.parts} | {f"{names.head}.weight"}
    others = [
        name
        for name in files.names
        if name not in used and not name.endswith(names.ignored) and not name.startswith(names.unserved)
    ]
    if others:
        more = f" and {len(others) - 5} more" if len(others) > 5 else ""
        log.warning("tensors that the model has no place for are left out: %s%s", ", ".join(others[:5]), more)


def checkpoint_dtype(folder: Path, files: WeightFiles) -> torch.dtype:
    """The type that most of a checkpoint's floating-point tensors are stored in; float32 if there are none."""
    if not files.names:
        raise ModelError(f"{folder}: the weight files hold no tensors")
    counts = Counter(dtype for name in files.names if (dtype := files.dtype(name)) in FLOATS)
    return counts.most_common(1)[0][0] if counts else torch.float32
