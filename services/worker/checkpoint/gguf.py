"""The tensors of a GGUF model under Hugging Face's names and in its layouts, dequantised when they are asked for."""

from collections.abc import Sequence
from pathlib import Path

import torch
from torch import Tensor

from kernels.quantized import QuantizedWeight
from services.worker.checkpoint.config_json import read_config
from shared.gguf.damage import damage_as_model_error
from shared.gguf.header import read_header
from shared.gguf.tensor_data import is_simple_quantized
from shared.gguf.tensors import find_sources

_STORED = {"F32": torch.float32, "F64": torch.float64, "F16": torch.float16, "BF16": torch.bfloat16}


class GGUFWeights:
    """All tensors of the model in `folder`, whose weights are in `paths`. Raises ModelError, naming a wrong tensor."""

    def __init__(self, folder: Path, paths: Sequence[Path]) -> None:
        with damage_as_model_error(paths[0]):
            self._sources = find_sources(read_header(paths[0]), read_config(folder))

    def keys(self) -> list[str]:
        return list(self._sources)

    def dtype(self, name: str) -> torch.dtype:
        """What a tensor is stored in; of a quantised one, what holds its numbers well: bfloat16."""
        return _STORED.get(self._sources[name].tensor.type.name, torch.bfloat16)

    def shape(self, name: str) -> tuple[int, ...]:
        return self._sources[name].shape

    def is_quantized(self, name: str) -> bool:
        return self._sources[name].tensor.type.name not in _STORED

    @property
    def has_codes(self) -> bool:
        """Whether some tensors are in blocks that the products can use."""
        return any(is_simple_quantized(source.tensor) for source in self._sources.values())

    def get_quantized(self, name: str) -> QuantizedWeight | None:
        """The matrix (outputs, inputs) as it is stored, if that is in blocks that the products can use."""
        found = self._sources[name].read_quantized()
        if found is None:
            return None
        codes, steps = torch.from_numpy(found.quants), torch.from_numpy(found.scales)
        leasts = None if found.mins is None else torch.from_numpy(found.mins)
        return QuantizedWeight(found.bits, codes, steps, leasts, found.zero_point)

    def get_tensor(self, name: str) -> Tensor:
        """The tensor, in the type it was stored in or, if that was no type of torch's, in float32."""
        source = self._sources[name]
        with damage_as_model_error(source.tensor):
            values = source.read(torch.get_num_threads())
        return torch.from_numpy(values if values.flags.writeable else values.copy())
