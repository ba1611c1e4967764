"""Reads adapters from folders in PEFT's format, and checks every name and shape against the model."""

import hashlib
from collections.abc import Iterable
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor

from kernels.lora import LoraPart
from services.worker.checkpoint.shard import Shard
from services.worker.checkpoint.weight_files import check_float, open_shard
from services.worker.models.adapters.peft_config import CONFIG_FILE, PeftConfig, read_config
from services.worker.models.adapters.targets import LoraTarget, LoraTargets
from shared.errors import ModelError

WEIGHT_FILES = ("adapter_model.safetensors", "adapter_model.bin")
PREFIX, A_SUFFIX, B_SUFFIX = "base_model.model.", ".lora_A.weight", ".lora_B.weight"
"""What PEFT adds to a module's name."""


class PeftAdapter(NamedTuple):
    """An adapter as its folder has it."""

    digest: str  # of its files
    parts: dict[LoraTarget, LoraPart]  # what this rank has of A and B of each module that it changes


def read_adapter(folder: Path, targets: LoraTargets, max_rank: int, dtype: torch.dtype) -> PeftAdapter:
    """Read the adapter in `folder`, for weights of `dtype`.

    Raise ModelError naming the field or tensor that does not fit the model, on every rank alike: each reads all of it,
    and keeps its part.
    """
    content = _read(folder / CONFIG_FILE)
    config = read_config(content)
    weights = _weights_file(folder)
    shard, parts = open_shard(weights), {}
    for module in _modules(shard.keys(), config, targets):
        target, part = targets.modules[module.short], _read_part(shard, module, config, targets, max_rank)
        for suffix, matrix in zip((A_SUFFIX, B_SUFFIX), part, strict=True):
            if not matrix.to(dtype).isfinite().all():  # the factor, or the type, may be too much for a finite number
                raise ModelError(f"tensor {module.tensor(suffix)} has numbers that are not finite as {dtype}")
        if targets.is_own(target):
            parts[target] = targets.own(target, part)
    return PeftAdapter(_digest(content, weights), parts)


class _Module(NamedTuple):
    """A module that an adapter changes."""

    name: str  # in the model that the adapter was trained with
    short: str  # without the prefix of the whole model

    def tensor(self, suffix: str) -> str:
        return f"{PREFIX}{self.name}{suffix}"


def _modules(tensors: Iterable[str], config: PeftConfig, targets: LoraTargets) -> list[_Module]:
    """Return the modules that an adapter changes. The names of its tensors, config and model must agree."""
    stored = dict.fromkeys(tensors)
    modules = dict.fromkeys(_module_of(tensor, config, targets) for tensor in stored)
    if not modules:
        raise ModelError("it has no tensors")
    needed = (module.tensor(suffix) for module in modules for suffix in (A_SUFFIX, B_SUFFIX))
    if absent := next((tensor for tensor in needed if tensor not in stored), None):
        raise ModelError(f"tensor {absent} is missing")
    first = next(iter(modules))
    prefix = first.name.removesuffix(first.short)
    for short in targets.modules:
        module = _Module(prefix + short, short)
        if module not in modules and config.targets(module.name):
            raise ModelError(f"tensor {module.tensor(A_SUFFIX)} is missing, and target_modules names its module")
    return list(modules)


def _module_of(tensor: str, config: PeftConfig, targets: LoraTargets) -> _Module:
    suffix = next((suffix for suffix in (A_SUFFIX, B_SUFFIX) if tensor.endswith(suffix)), None)
    if suffix is None or not tensor.startswith(PREFIX):
        raise ModelError(f"tensor {tensor} is not supported: it is not A or B of a linear module")
    name = tensor.removeprefix(PREFIX).removesuffix(suffix)
    shorts = [name.removeprefix(prefix) for prefix in targets.prefixes if name.startswith(prefix)]
    short = next((short for short in shorts if short in targets.modules), None)
    if short is None:
        known = targets.unsupported.intersection([*shorts, name])
        reason = "adapters cannot change this module" if known else "the model has no such linear module"
        raise ModelError(f"tensor {tensor} does not fit: {reason}")
    if not config.targets(name):
        raise ModelError(f"tensor {tensor} is there, but target_modules does not name its module")
    return _Module(name, short)


def _read_part(shard: Shard, module: _Module, config: PeftConfig, targets: LoraTargets, max_rank: int) -> LoraPart:
    target, rank = targets.modules[module.short], config.rank(module.name)
    if rank > max_rank:
        raise ModelError(f"tensor {module.tensor(A_SUFFIX)} has rank {rank}, above --max-lora-rank {max_rank}")
    a = _read_tensor(shard, module.tensor(A_SUFFIX), (rank, target.inputs))
    b = _read_tensor(shard, module.tensor(B_SUFFIX), (target.outputs, rank))
    return a, b * config.scale(module.name)


def _read_tensor(shard: Shard, name: str, shape: tuple[int, int]) -> Tensor:
    """Return a tensor in float32."""
    stored = shard.get_tensor(name)
    if tuple(stored.shape) != shape:
        raise ModelError(f"tensor {name} has shape {list(stored.shape)}, not {list(shape)} as model and config say")
    check_float(name, stored.dtype)
    return stored.to(torch.float32, copy=True)


def _weights_file(folder: Path) -> Path:
    for name in WEIGHT_FILES:
        if (folder / name).is_file():
            return folder / name
    raise ModelError(f"none of {', '.join(WEIGHT_FILES)} is there")


def _read(path: Path) -> bytes:
    try:
        if not path.is_file():  # a pipe would be waited for
            raise ModelError(f"{path} is no file: {path.parent} is no adapter's folder")
        return path.read_bytes()
    except OSError as error:
        raise ModelError(f"{path}: {error}") from error


def _digest(config: bytes, weights: Path) -> str:
    """Return 16 hexadecimal digits that identify the content of both files."""
    with weights.open("rb") as file:
        digest = hashlib.file_digest(file, "sha256")
    digest.update(config)
    return digest.hexdigest()[:16]
