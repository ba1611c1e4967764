"""The tensors of a model folder, whichever way they are stored, read one by one.

Safetensors, PyTorch's own files and GGUF, whole or in shards. Nothing is unpickled but tensors. Whatever is absent,
cut short or unreadable is a ModelError naming the file.
"""

import logging
import pickle
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, Literal

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from kernels.quantized import QuantizedWeight
from services.worker.checkpoint.gguf import GGUFWeights
from services.worker.checkpoint.gptq_awq import PackedWeights, Shard
from services.worker.checkpoint.quantization_config import PackedFormat
from services.worker.checkpoint.weight_paths import Format, find_weights, index_passed_over
from services.worker.models.precision import Stored
from shared.errors import ModelError

log = logging.getLogger(__name__)

FLOATS = (torch.float64, torch.float32, torch.float16, torch.bfloat16)
"""Types whose numbers are the weights. Those of any other are codes, which mean nothing without their scales."""


class WeightFiles:
    """All tensors of a folder by name. They are maps of the files where the format allows it, so copy, don't keep."""

    def __init__(self, folder: Path, wanted: Format = "auto", packed: PackedFormat | None = None) -> None:
        """`packed` is how matrices are stored that are no floats, where there are such."""
        self.kind, self.paths = find_weights(folder, wanted)
        if index := index_passed_over(self.paths):
            line = "%s: %s is served and %s, which lists other files, is not: one of the two is a leftover"
            log.warning(line, folder, self.paths[0].name, index.name)
        self._shards: dict[str, Shard] = {}  # by tensor
        for shard in self._open(folder, self.kind):
            self._shards |= dict.fromkeys(shard.keys(), shard)
        self._packed = PackedWeights(dict(self._shards), packed) if packed else None
        if self._packed:
            self._replace(self._packed)

    def _open(self, folder: Path, kind: str) -> Iterator[Shard]:
        if kind == "gguf":
            yield GGUFWeights(folder, self.paths)
            return
        opener: Callable[[Path], Shard] = _open_safetensors if kind == "safetensors" else _PickledShard
        yield from map(opener, self.paths)

    def _replace(self, packed: PackedWeights) -> None:
        """Show matrices in the place of what they are made of."""
        if twice := [name for name in packed.keys() if name in self._shards]:  # noqa: SIM118  (it is no mapping)
            raise ModelError(f"tensor {twice[0]} is there twice: also as codes (qweight)")
        self._shards = {name: shard for name, shard in self._shards.items() if name not in packed.parts}
        self._shards |= dict.fromkeys(packed.keys(), packed)

    @property
    def names(self) -> list[str]:
        return list(self._shards)

    def __contains__(self, name: str) -> bool:
        return name in self._shards

    def dtype(self, name: str) -> torch.dtype:
        """The type in which the tensor called `name` is stored; asking does not read it."""
        shard = self._shards[name]
        return shard.dtype(name) if isinstance(shard, GGUFWeights | PackedWeights) else self.get(name).dtype

    def shape(self, name: str) -> tuple[int, ...]:
        """The shape of the tensor called `name`; asking does not read it."""
        shard = self._shards[name]
        return shard.shape(name) if isinstance(shard, GGUFWeights | PackedWeights) else tuple(self.get(name).shape)

    def outputs_first(self, name: str) -> bool:
        """Whether the matrix called `name` is (outputs, inputs) here, also in families that transpose theirs."""
        return isinstance(self._shards.get(name), PackedWeights)

    @property
    def quantization(self) -> Stored | Literal["other"] | None:
        """In what codes it is stored; `other` are such that no product takes."""
        if self._packed:
            return self._packed.method
        found = next((shard for shard in self._shards.values() if isinstance(shard, GGUFWeights)), None)
        if found and found.has_codes:
            return "gguf"
        return "other" if any(map(self.is_quantized, self.names)) else None

    def is_quantized(self, name: str) -> bool:
        """Whether the tensor called `name` is stored as codes of some kind."""
        shard = self._shards[name]
        return isinstance(shard, PackedWeights) or (isinstance(shard, GGUFWeights) and shard.is_quantized(name))

    def get_quantized(self, name: str) -> QuantizedWeight | None:
        """The matrix called `name`, (outputs, inputs), as it is stored, if that is in codes that products can use."""
        shard = self._shards[name]
        return shard.get_quantized(name) if isinstance(shard, GGUFWeights | PackedWeights) else None

    def get(self, name: str) -> Tensor:
        """The tensor called `name`."""
        if name not in self._shards:
            raise ModelError(f"{self.paths[0].parent}: tensor {name} is missing")
        try:
            return self._shards[name].get_tensor(name)
        except (SafetensorError, OSError, RuntimeError) as error:
            raise ModelError(f"{self.paths[0].parent}: tensor {name} cannot be read: {error}") from error


def refuse_codes(name: str, dtype: torch.dtype) -> None:
    """Raises ModelError if a weight called `name` is not of a type that is its own numbers."""
    if dtype not in FLOATS:
        known = ", ".join(str(kind).removeprefix("torch.") for kind in FLOATS)
        raise ModelError(f"tensor {name} is of {dtype}: quantised weights are not supported (supported: {known})")


class _PickledShard:
    def __init__(self, path: Path) -> None:
        try:
            read = _load(path)
        except (pickle.UnpicklingError, RuntimeError, OSError, EOFError, ValueError) as error:
            reason = str(error).partition("\n")[0] or type(error).__name__  # torch adds a page of advice
            raise ModelError(f"{path} cannot be read: {reason}") from error
        if not isinstance(read, Mapping):
            raise ModelError(f"{path} holds {type(read).__name__}, not tensors by name")
        self._tensors: dict[str, Tensor] = {name: part for name, part in read.items() if isinstance(part, Tensor)}

    def keys(self) -> list[str]:
        return list(self._tensors)

    def get_tensor(self, name: str) -> Tensor:
        return self._tensors[name]


def _load(path: Path) -> Any:
    def read(mmap: bool) -> Any:
        return torch.load(path, map_location="cpu", weights_only=True, mmap=mmap)

    try:
        return read(mmap=True)
    except RuntimeError as error:
        if "mmap" not in str(error):
            raise
        return read(mmap=False)  # written before torch 1.6: not a zip file, so it cannot be mapped


def _open_safetensors(path: Path) -> Shard:
    try:
        shard: Shard = safe_open(path, framework="pt")
    except (SafetensorError, OSError) as error:
        raise ModelError(f"{path} cannot be read: {error}") from error
    return shard
