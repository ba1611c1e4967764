"""The tensors of a GGUF model, with Hugging Face's names and layouts. They are dequantised when they are read."""

from collections.abc import Sequence
from pathlib import Path

import torch
from gguf.constants import GGML_QUANT_SIZES
from torch import Tensor

from kernels.gguf_weight import PACKED_TYPES, GGUFPart, GGUFWeight
from kernels.quantized import QUANT_GROUP_SIZE, Rows, StoredRows
from services.worker.checkpoint.config_json import ConfigJson
from shared.gguf.damage import damage_as_model_error
from shared.gguf.header import read_header
from shared.gguf.tensor_data import Region, is_mapped
from shared.gguf.tensors import GGUFTensor, find_tensors

_DTYPES = {"F32": torch.float32, "F64": torch.float64, "F16": torch.float16, "BF16": torch.bfloat16}


class GGUFWeights:
    """The tensors of the GGUF files `paths`. Methods raise ModelError naming a tensor that is broken."""

    def __init__(self, config: ConfigJson, paths: Sequence[Path]) -> None:
        with damage_as_model_error(paths[0]):
            self._tensors = find_tensors(read_header(paths[0]), config)

    def keys(self) -> list[str]:
        return list(self._tensors)

    def dtype(self, name: str) -> torch.dtype:
        """Return the type of a tensor; bfloat16 for quantised ones, since it is precise enough for their numbers."""
        return _DTYPES.get(self._tensors[name].stored.type.name, torch.bfloat16)

    def shape(self, name: str) -> tuple[int, ...]:
        return self._tensors[name].shape

    def is_quantized(self, name: str) -> bool:
        return self._tensors[name].stored.type.name not in _DTYPES

    @property
    def has_usable_blocks(self) -> bool:
        """True if some tensors are in a format that matmuls can use."""
        return any(tensor.stored.type in PACKED_TYPES for tensor in self._tensors.values())

    def get_quantized(self, name: str, region: Region = ()) -> GGUFWeight | None:
        """Return the matrix (outputs, inputs) as blocks in the file, or None if matmuls cannot use their type."""
        tensor = self._tensors[name]
        type = tensor.stored.type
        if type not in PACKED_TYPES:
            return None
        inputs = region[1] if region else slice(0, tensor.matrix_shape[1])
        first, count = inputs.start % GGML_QUANT_SIZES[type][0], inputs.stop - inputs.start
        parts = [GGUFPart(type, torch.from_numpy(blocks), first, count) for blocks in tensor.map_matrix(region)]
        return GGUFWeight(parts)

    def dequantized_rows(self, name: str, region: Region = ()) -> Rows | None:
        """Return the matrix (outputs, inputs) in float32; None if it is no matrix, or is mapped as it is."""
        tensor = self._tensors[name]
        if is_mapped(tensor.stored) or len(tensor.shape) == 1:
            return None
        rows, parts = _ComputedRows(tensor, region), self._stored_parts(name, region)
        return StoredRows(parts, rows) if parts else rows

    def _stored_parts(self, name: str, region: Region) -> Sequence[Tensor | GGUFPart]:
        """Return the matrix in parts that the CPU's kernels read as floats; none if they cannot."""
        if weight := self.get_quantized(name, region):
            sizes = [size for part in weight.parts for size in (part.first, part.inputs)]
            return [] if any(size % QUANT_GROUP_SIZE for size in sizes) else weight.parts
        tensor = self._tensors[name]
        if dtype := _DTYPES.get(tensor.stored.type.name):
            return [torch.from_numpy(numbers).view(dtype)[..., 0] for numbers in tensor.map_matrix(region)]
        return []

    def mapped(self, name: str, region: Region = ()) -> list[Tensor]:
        """Return the bytes of the file that the tensor is read from."""
        tensor = self._tensors[name]
        with damage_as_model_error(tensor.stored):
            return [torch.from_numpy(tensor.map(region))]

    def get_tensor(self, name: str, region: Region = ()) -> Tensor:
        """Return the tensor in its stored type, or in float32 if torch has no such type."""
        tensor = self._tensors[name]
        with damage_as_model_error(tensor.stored):
            return torch.from_numpy(tensor.read(torch.get_num_threads(), region))


class _ComputedRows:
    """A region of a matrix (outputs, inputs). Its rows are dequantised to float32 when they are asked for."""

    def __init__(self, tensor: GGUFTensor, region: Region) -> None:
        self._tensor, self._region = tensor, region

    @property
    def shape(self) -> tuple[int, ...]:
        if not self._region:
            return self._tensor.matrix_shape
        return tuple(side.stop - side.start for side in self._region)

    def __getitem__(self, rows: slice) -> Tensor:
        with damage_as_model_error(self._tensor.stored):
            return torch.from_numpy(self._tensor.read_rows(rows, torch.get_num_threads(), self._region))
