"""The tensors of a GGUF model under Hugging Face's names and in its layouts, dequantised when they are asked for."""

from collections.abc import Sequence
from pathlib import Path

import torch
from torch import Tensor

from kernels.quantized import QuantizedWeight
from services.worker.checkpoint.config_json import ConfigJson
from shared.gguf.damage import damage_as_model_error
from shared.gguf.header import read_header
from shared.gguf.tensor_data import is_simple_quantized
from shared.gguf.tensors import find_sources

_DTYPES = {"F32": torch.float32, "F64": torch.float64, "F16": torch.float16, "BF16": torch.bfloat16}


class GGUFWeights:
    """The tensors of the GGUF files `paths`, whose model has this config. Every method names a broken tensor."""

    def __init__(self, config: ConfigJson, paths: Sequence[Path]) -> None:
        with damage_as_model_error(paths[0]):
            self._sources = find_sources(read_header(paths[0]), config)

    def keys(self) -> list[str]:
        return list(self._sources)

    def dtype(self, name: str) -> torch.dtype:
        """Return the type that a tensor is stored in; bfloat16 for a quantised one, whose numbers it holds well."""
        return _DTYPES.get(self._sources[name].tensor.type.name, torch.bfloat16)

    def shape(self, name: str) -> tuple[int, ...]:
        return self._sources[name].shape

    def is_quantized(self, name: str) -> bool:
        return self._sources[name].tensor.type.name not in _DTYPES

    @property
    def has_usable_blocks(self) -> bool:
        """Tell if some tensors are in blocks that matmuls can use."""
        return any(is_simple_quantized(source.tensor) for source in self._sources.values())

    def get_quantized(self, name: str) -> QuantizedWeight | None:
        """Return the matrix (outputs, inputs) as it is stored, if that is in blocks that matmuls can use."""
        matrix = self._sources[name].read_quantized()
        if matrix is None:
            return None
        quants, scales = torch.from_numpy(matrix.quants), torch.from_numpy(matrix.scales)
        mins = None if matrix.mins is None else torch.from_numpy(matrix.mins)
        return QuantizedWeight(matrix.bits, quants, scales, mins, matrix.zero_point)

    def get_tensor(self, name: str) -> Tensor:
        """Return the tensor, in the type it was stored in or, if that was no type of torch's, in float32."""
        source = self._sources[name]
        with damage_as_model_error(source.tensor):
            values = source.read(torch.get_num_threads())
        return torch.from_numpy(values if values.flags.writeable else values.copy())
