"""From a model folder to weights on the device.

Each parameter's memory is taken once, in its final type and place, and the checkpoint's tensors are copied into their
parts of it: fusing, converting and moving are one pass, and there is never a second copy. Every name and shape is
checked: a model with a random or missing weight must not start.
"""

import logging
import math
from collections.abc import Iterator
from pathlib import Path

import torch
from torch import Tensor

from services.worker.models.spec import DecoderSpec, WeightNames, parameters
from services.worker.weight_files import WeightFiles
from shared.errors import ModelError
from shared.progress import progress

log = logging.getLogger(__name__)

Parts = list[tuple[str, tuple[int, ...]]]  # (tensor of the checkpoint, its shape)


def load_weights(
    files: WeightFiles, spec: DecoderSpec, names: WeightNames, dtype: torch.dtype, device: torch.device
) -> dict[str, Tensor]:
    """All of `parameters(spec)`. Raises ModelError naming a tensor that is missing or has the wrong shape."""
    wanted = dict(_sources(files, spec, names))
    missing = [name for parts in wanted.values() for name, _ in parts if name not in files]
    if missing:
        more = f" (and {len(missing) - 1} more)" if len(missing) > 1 else ""
        raise ModelError(f"{files.paths[0].parent}: tensor {missing[0]} is missing{more}")
    _warn_of_others(files, wanted, names)
    weights: dict[str, Tensor] = {}
    total = sum(math.prod(shape) for parts in wanted.values() for _, shape in parts) * dtype.itemsize
    with progress("loading weights", total) as done:
        for name, parts in wanted.items():
            weights[name] = _assemble(files, parts, dtype, device)
            done(weights[name].nbytes)
    return weights


def random_weights(spec: DecoderSpec, dtype: torch.dtype, device: torch.device) -> dict[str, Tensor]:
    """Weights drawn from a fixed seed, for measuring a shape without its checkpoint."""
    generator = torch.Generator().manual_seed(0)
    weights: dict[str, Tensor] = {}
    for name, parts in parameters(spec).items():
        shape = (sum(part[0] for part in parts), *parts[0][1:])
        drawn = torch.randn(shape, generator=generator).mul_(0.02)
        weights[name] = (drawn + 1 if "norm.weight" in name else drawn).to(device, dtype)
    return weights


def _sources(files: WeightFiles, spec: DecoderSpec, names: WeightNames) -> Iterator[tuple[str, Parts]]:
    """Each parameter, and the tensors that make it."""
    anchor = names.modules["embedding"] + ".weight"
    prefix = next((prefix for prefix in names.prefixes if prefix + anchor in files), names.prefixes[0])
    for parameter, shapes in parameters(spec).items():
        module, kind = parameter.rsplit(".", 1)
        if module == "head":
            modules: tuple[str, ...] = (names.head,)
        elif module.startswith("layers."):
            _, layer, part = module.split(".")
            modules = tuple(prefix + names.layer.format(layer) + name for name in names.layer_modules[part])
        else:
            modules = (prefix + names.modules[module],)
        yield parameter, [(f"{name}.{kind}", shape) for name, shape in zip(modules, shapes, strict=True)]


def _assemble(files: WeightFiles, parts: Parts, dtype: torch.dtype, device: torch.device) -> Tensor:
    rows = sum(shape[0] for _, shape in parts)
    whole = torch.empty((rows, *parts[0][1][1:]), dtype=dtype, device=device)
    row = 0
    for name, shape in parts:
        tensor = files.get(name)
        if tuple(tensor.shape) != shape:
            raise ModelError(f"tensor {name} has shape {list(tensor.shape)}, and config.json says {list(shape)}")
        if not tensor.is_floating_point():
            raise ModelError(f"tensor {name} is of {tensor.dtype}: quantised weights are not supported")
        whole[row : row + shape[0]].copy_(tensor)
        row += shape[0]
    return whole


def _warn_of_others(files: WeightFiles, wanted: dict[str, Parts], names: WeightNames) -> None:
    used = {name for parts in wanted.values() for name, _ in parts} | {f"{names.head}.weight"}
    others = [name for name in files.names if name not in used and not name.endswith(names.ignored)]
    if others:
        more = f" and {len(others) - 5} more" if len(others) > 5 else ""
        log.warning("tensors that the model has no place for are left out: %s%s", ", ".join(others[:5]), more)


def checkpoint_dtype(folder: Path, files: WeightFiles) -> torch.dtype:
    """The type that most of a checkpoint's tensors are stored in."""
    counts: dict[torch.dtype, int] = {}
    for name in files.names:
        dtype = files.get(name).dtype
        counts[dtype] = counts.get(dtype, 0) + 1
    if not counts:
        raise ModelError(f"{folder}: the weight files hold no tensors")
    return max(counts, key=lambda dtype: counts[dtype])
