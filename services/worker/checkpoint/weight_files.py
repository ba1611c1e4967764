"""`WeightFiles`: reads the tensors of a model folder one by one, whatever their format.

Formats are safetensors, PyTorch's own and GGUF, in one file or in shards. Only tensors are unpickled. A file that is
missing, cut short or unreadable raises a ModelError that names it.
"""

import logging
import pickle
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Literal

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from kernels.gguf_weight import GGUFWeight
from kernels.quantized import QuantizedWeight, Rows
from kernels.table_weight import TableWeight
from services.worker.checkpoint.gguf import GGUFWeights
from services.worker.checkpoint.gptq_awq import GPTQAWQWeights
from services.worker.checkpoint.model_folder import ModelFolder, WeightFormat, find_weights, ignored_index
from services.worker.checkpoint.quantization_config import CheckpointQuantization, QuantizationConfig
from services.worker.checkpoint.shard import Shard
from services.worker.checkpoint.squeezellm import SqueezeLLMWeights
from shared.errors import ModelError
from shared.gguf.tensor_data import Region

logger = logging.getLogger(__name__)

FLOATS = (torch.float64, torch.float32, torch.float16, torch.bfloat16)
"""Types of weights. Tensors of other types hold quants, which mean nothing without their scales."""

_Packed = GPTQAWQWeights | SqueezeLLMWeights
_Quantized = _Packed | GGUFWeights


class WeightFiles:
    """The tensors of a folder by name. They may be memory maps of the files, so copy those that you keep."""

    def __init__(self, folder: ModelFolder, requested: WeightFormat = "auto") -> None:
        self._folder = folder
        self._format, self.paths = find_weights(folder.path, requested)
        if index := ignored_index(self.paths):
            line = "%s: %s is served and %s, which lists other files, is not: one of the two is a leftover"
            logger.warning(line, folder.path, self.paths[0].name, index.name)
        self._shards: dict[str, Shard] = {}  # by tensor
        for shard in self._open():
            self._shards |= dict.fromkeys(shard.keys(), shard)
        self._packed = _find_packed(dict(self._shards), folder.quantization) if folder.quantization else None
        if self._packed:
            self._hide_packed_tensors(self._packed)

    def _open(self) -> Iterator[Shard]:
        if self._format == "gguf":
            yield GGUFWeights(self._folder.config, self.paths)
            return
        opener: Callable[[Path], Shard] = _SafetensorsShard if self._format == "safetensors" else _PickledShard
        yield from map(opener, self.paths)

    def _hide_packed_tensors(self, packed: _Packed) -> None:
        """Replace the tensors that packed matrices are made from by these matrices."""
        if twice := [name for name in packed.keys() if name in self._shards]:  # noqa: SIM118  (it is not a mapping)
            raise ModelError(f"tensor {twice[0]} is there twice: also as quants (qweight)")
        self._shards = {name: shard for name, shard in self._shards.items() if name not in packed.packed_names}
        self._shards |= dict.fromkeys(packed.keys(), packed)

    @property
    def names(self) -> list[str]:
        return list(self._shards)

    def __contains__(self, name: str) -> bool:
        return name in self._shards

    def dtype(self, name: str) -> torch.dtype:
        """Return the type in which the tensor called `name` is stored, without reading it."""
        shard = self._shards[name]
        return shard.dtype(name) if isinstance(shard, _Quantized) else self.get(name).dtype

    def shape(self, name: str) -> tuple[int, ...]:
        """Return the shape of the tensor called `name`, without reading it."""
        shard = self._shards[name]
        return shard.shape(name) if isinstance(shard, _Quantized) else tuple(self.get(name).shape)

    def outputs_first(self, name: str) -> bool:
        """Return whether the matrix called `name` is (outputs, inputs), even if the family transposes its weights."""
        return isinstance(self._shards.get(name), _Packed)

    @property
    def main_dtype(self) -> torch.dtype:
        """The type that most floating-point tensors are stored in; float32 if there are none."""
        if not self._shards:
            raise ModelError(f"{self._folder.path}: the weight files hold no tensors")
        counts = Counter(dtype for name in self._shards if (dtype := self.dtype(name)) in FLOATS)
        return counts.most_common(1)[0][0] if counts else torch.float32

    @property
    def quantization(self) -> CheckpointQuantization | Literal["other"] | None:
        """The format of quantised weights; `other`: matmuls cannot use it."""
        if self._packed:
            return self._packed.method
        gguf = next((shard for shard in self._shards.values() if isinstance(shard, GGUFWeights)), None)
        if gguf and gguf.has_usable_blocks:
            return "gguf"
        return "other" if any(map(self.is_quantized, self._shards)) else None

    def is_quantized(self, name: str) -> bool:
        """Return whether the tensor called `name` is quantised, in any format."""
        shard = self._shards[name]
        return isinstance(shard, _Packed) or (isinstance(shard, GGUFWeights) and shard.is_quantized(name))

    def get_quantized(self, name: str, region: Region = ()) -> QuantizedWeight | GGUFWeight | TableWeight | None:
        """Return what `region` takes of the matrix called `name` (outputs, inputs) with its quants, or None if matmuls
        cannot use them.
        """
        shard = self._shards[name]
        return shard.get_quantized(name, region) if isinstance(shard, _Quantized) else None

    def mapped(self, name: str, region: Region = ()) -> list[Tensor]:
        """Return the parts of mapped files that `get` reads; none if the tensor is in memory."""
        with self._errors_named(name):
            return self._shards[name].mapped(name, region)

    def dequantized_rows(self, name: str, region: Region = ()) -> Rows | None:
        """Return what `region` takes of the matrix called `name` (outputs, inputs), whose rows are yet to be computed;
        None if it is stored as floats.
        """
        shard = self._shards.get(name)
        return shard.dequantized_rows(name, region) if isinstance(shard, GGUFWeights | GPTQAWQWeights) else None

    def get(self, name: str, region: Region = ()) -> Tensor:
        """Return what `region` takes of the tensor called `name`."""
        if name not in self._shards:
            raise ModelError(f"{self.paths[0].parent}: tensor {name} is missing")
        with self._errors_named(name):
            return self._shards[name].get_tensor(name, region)

    @contextmanager
    def _errors_named(self, name: str) -> Iterator[None]:
        """Raise a ModelError that names the tensor called `name` for an error of reading it within the block."""
        try:
            yield
        except (SafetensorError, OSError, RuntimeError) as error:
            raise ModelError(f"{self.paths[0].parent}: tensor {name} cannot be read: {error}") from error


def _find_packed(tensors: Mapping[str, Shard], config: QuantizationConfig) -> _Packed:
    return SqueezeLLMWeights(tensors) if config.method == "squeezellm" else GPTQAWQWeights(tensors, config)


def open_shard(path: Path) -> Shard:
    """Open a single file of weights, in safetensors or else in PyTorch's own format. Raise ModelError naming it."""
    return _SafetensorsShard(path) if path.suffix == ".safetensors" else _PickledShard(path)


def check_float(name: str, dtype: torch.dtype) -> None:
    """Raise ModelError unless the weight called `name` has one of `FLOATS` as its type."""
    if dtype not in FLOATS:
        supported = ", ".join(str(float_type).removeprefix("torch.") for float_type in FLOATS)
        raise ModelError(f"tensor {name} is of {dtype}: quantised weights are not supported (supported: {supported})")


def warn_of_unused(names: Sequence[str]) -> None:
    """Log a warning of the tensors that the model does not use, if there are any."""
    if names:
        more = f" and {len(names) - 5} more" if len(names) > 5 else ""
        logger.warning("tensors that the model has no place for are left out: %s%s", ", ".join(names[:5]), more)


class _SafetensorsShard:
    def __init__(self, path: Path) -> None:
        try:
            self._file: Any = safe_open(path, framework="pt")
        except (SafetensorError, OSError) as error:
            raise ModelError(f"{path} cannot be read: {error}") from error

    def keys(self) -> list[str]:
        return list(self._file.keys())

    def get_tensor(self, name: str, region: Region = ()) -> Tensor:
        tensor: Tensor = self._file.get_tensor(name)[region]
        return tensor

    def mapped(self, name: str, region: Region = ()) -> list[Tensor]:
        return [self.get_tensor(name, region)]


class _PickledShard:
    def __init__(self, path: Path) -> None:
        self._is_mapped = True
        try:
            content = self._load(path)
        except (pickle.UnpicklingError, RuntimeError, OSError, EOFError, ValueError) as error:
            reason = str(error).partition("\n")[0] or type(error).__name__  # torch adds a page of advice
            raise ModelError(f"{path} cannot be read: {reason}") from error
        if not isinstance(content, Mapping):
            raise ModelError(f"{path} holds {type(content).__name__}, not tensors by name")
        self._tensors = {
            name: value.detach()  # a parameter's parts could not be written to
            for name, value in content.items()
            if isinstance(name, str) and isinstance(value, Tensor)
        }
        if unusual := next((name for name, value in self._tensors.items() if not _is_plain(value)), None):
            raise ModelError(f"{path}: tensor {unusual} is {_describe(self._tensors[unusual])}, not plain numbers")

    def keys(self) -> list[str]:
        return list(self._tensors)

    def get_tensor(self, name: str, region: Region = ()) -> Tensor:
        return self._tensors[name][region]

    def mapped(self, name: str, region: Region = ()) -> list[Tensor]:
        return [self._tensors[name][region]] if self._is_mapped else []

    def _load(self, path: Path) -> Any:
        def read(mmap: bool) -> Any:
            return torch.load(path, map_location="cpu", weights_only=True, mmap=mmap)

        try:
            return read(mmap=True)
        except RuntimeError as error:
            if "mmap" not in str(error):
                raise
            self._is_mapped = False  # written before torch 1.6: not a zip file, so it cannot be mapped
            return read(mmap=False)


def _is_plain(tensor: Tensor) -> bool:
    """Return whether all numbers of a tensor are in memory, one after the other."""
    is_strided = tensor.layout == torch.strided and not tensor.is_nested
    return is_strided and not tensor.is_quantized and tensor.device.type == "cpu"


def _describe(tensor: Tensor) -> str:
    kinds = {"quantized": tensor.is_quantized, "nested": tensor.is_nested, "on no device": tensor.is_meta}
    return next((kind for kind, applies in kinds.items() if applies), str(tensor.layout).removeprefix("torch."))
