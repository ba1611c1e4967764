"""Reads the quantised weights of SqueezeLLM checkpoints (Kim et al., 2023, arXiv 2306.07629).

Instead of `weight`, a layer has codes, which are looked up in a table for each output, and maybe outliers to be added:

    qweight (in / 8, out) int32         the codes of eight inputs in each, the lowest bits first
    lookup_table (out, 16) floats
    rows (out + 1,), cols, vals         a sparse matrix in compressed rows, one for each output
    full_row_indices (top,)             outputs with so many outliers that they are stored in whole
    full_rows (in, top)                 and their outliers, to be added like the others

`startrows` and the settings `sparse_threshold.*` of some checkpoints only divide the work of a kernel.
"""

from collections.abc import Mapping
from typing import Literal

import torch
from torch import Tensor

from kernels.table_weight import CODES_PER_WORD, TABLE_SIZE, Outliers, TablePart, TableWeight, words_of
from services.worker.checkpoint.shard import SCALE_DTYPES, Shard, describe, quantized_modules, read_tensor
from shared.errors import ModelError
from shared.gguf.tensor_data import Region

_SUFFIXES = (".qweight", ".lookup_table", ".rows", ".cols", ".vals", ".full_rows", ".full_row_indices", ".startrows")
_SETTINGS = "sparse_threshold."
_INDEX_DTYPES = (torch.int32, torch.int64)
_INPUTS = 32  # each weight has a multiple of them: SqueezeLLM packs no others


class SqueezeLLMWeights:
    """The matrices in `tensors`, a map from each tensor's name to its file.

    The constructor raises ModelError naming a tensor that is invalid.
    """

    method: Literal["squeezellm"] = "squeezellm"

    def __init__(self, tensors: Mapping[str, Shard]) -> None:
        self._tensors = tensors
        modules = quantized_modules(tensors, self.method)
        self._matrices = {f"{module}.weight": self._matrix(module) for module in modules}
        self.packed_names = {module + suffix for module in modules for suffix in _SUFFIXES}
        self.packed_names |= {name for name in tensors if name.startswith(_SETTINGS)}

    def keys(self) -> list[str]:
        return list(self._matrices)

    def dtype(self, name: str) -> torch.dtype:
        """Return the type of the matrix's tables."""
        return self._matrices[name].tables.dtype

    def shape(self, name: str) -> tuple[int, ...]:
        """Return (outputs, inputs), even in families whose unquantised weights are transposed."""
        return TableWeight([self._matrices[name]]).shape

    def mapped(self, name: str, region: Region = ()) -> list[Tensor]:
        """Return what is mapped of the matrix's codes; its other tensors are small, or in memory."""
        qweight = f"{name.removesuffix('.weight')}.qweight"
        if not region:
            return self._tensors[qweight].mapped(qweight)
        outputs, inputs = region
        return self._tensors[qweight].mapped(qweight, (words_of(inputs), outputs))

    def get_tensor(self, name: str, region: Region = ()) -> Tensor:
        """Return the matrix in float32."""
        return self._part(name, region).dequantize()

    def get_quantized(self, name: str, region: Region = ()) -> TableWeight:
        return TableWeight([self._part(name, region)])

    def _part(self, name: str, region: Region) -> TablePart:
        """Return what `region` takes of the outputs and the inputs of a matrix."""
        part = self._matrices[name]
        if not region or self.shape(name) == tuple(side.stop - side.start for side in region):
            return part
        outputs, inputs = region
        if inputs.start % CODES_PER_WORD or inputs.stop % CODES_PER_WORD:
            raise ModelError(
                f"tensor {name.removesuffix('.weight')}.qweight: inputs {inputs.start} to {inputs.stop}, a rank's "
                f"part, are no whole words of {CODES_PER_WORD} codes: try a smaller --tensor-parallel-size"
            )
        return part.region(outputs, inputs)

    def _matrix(self, module: str) -> TablePart:
        qweight, tables = (read_tensor(self._tensors, f"{module}.{name}") for name in ("qweight", "lookup_table"))
        if qweight.dtype != torch.int32 or qweight.ndim != 2:
            raise ModelError(f"tensor {module}.qweight must be a matrix of int32, and is {describe(qweight)}")
        inputs, outputs = len(qweight) * CODES_PER_WORD, qweight.shape[1]
        if inputs == 0 or inputs % _INPUTS:
            raise ModelError(f"tensor {module}.qweight is of {inputs} inputs, which is no multiple of {_INPUTS}")
        _check_floats(f"{module}.lookup_table", tables, (outputs, TABLE_SIZE))
        outliers = self._outliers(module, outputs, inputs)
        return TablePart(qweight.contiguous(), tables.contiguous(), outliers)

    def _outliers(self, module: str, outputs: int, inputs: int) -> Outliers | None:
        parts = [
            part
            for part in (self._sparse(module, outputs, inputs), self._full_rows(module, outputs, inputs))
            if part is not None
        ]
        if not parts:
            return None
        row, column, value = (torch.cat(tensors) for tensors in zip(*parts, strict=True))
        order = row.argsort(stable=True)
        offsets = torch.cat((torch.zeros(1).long(), row.bincount(minlength=outputs).cumsum(0)))
        return Outliers(offsets, column[order].int(), value[order].float()) if len(row) else None

    def _sparse(self, module: str, outputs: int, inputs: int) -> tuple[Tensor, Tensor, Tensor] | None:
        """Return the output, input and value of each entry of the sparse matrix; None if the module has none."""
        names = [f"{module}.{name}" for name in ("rows", "cols", "vals")]
        if not any(name in self._tensors for name in names):
            return None
        rows, columns, values = (read_tensor(self._tensors, name) for name in names)
        _check_integers(names[0], rows, outputs + 1)
        if rows[0] != 0 or (rows.diff() < 0).any():
            raise ModelError(f"tensor {names[0]} must begin with 0 and never fall")
        entries = int(rows[-1])
        _check_integers(names[1], columns, entries)
        _check_below(names[1], columns, inputs)
        _check_floats(names[2], values, (entries,))
        return torch.arange(outputs).repeat_interleave(rows.long().diff()), columns.long(), values.float()

    def _full_rows(self, module: str, outputs: int, inputs: int) -> tuple[Tensor, Tensor, Tensor] | None:
        """Return the same for outputs that are stored in whole."""
        names = [f"{module}.{name}" for name in ("full_row_indices", "full_rows")]
        if not any(name in self._tensors for name in names):
            return None
        indices, full_rows = (read_tensor(self._tensors, name) for name in names)
        _check_integers(names[0], indices, indices.numel())
        _check_below(names[0], indices, outputs)
        _check_floats(names[1], full_rows, (inputs, len(indices)))
        which, column = full_rows.T.nonzero(as_tuple=True)
        return indices.long()[which], column, full_rows.T[which, column].float()


def _check_floats(name: str, tensor: Tensor, shape: tuple[int, ...]) -> None:
    if tensor.dtype not in SCALE_DTYPES:
        raise ModelError(f"tensor {name} must be of floats, and is {describe(tensor)}")
    if tuple(tensor.shape) != shape:
        raise ModelError(f"tensor {name} has shape {list(tensor.shape)}, and its codes need {list(shape)}")
    if not tensor.isfinite().all():
        raise ModelError(f"tensor {name} has values that are not finite")


def _check_integers(name: str, tensor: Tensor, count: int) -> None:
    if tensor.dtype not in _INDEX_DTYPES or tuple(tensor.shape) != (count,):
        raise ModelError(f"tensor {name} must be of {count} integers, and is {describe(tensor)}")


def _check_below(name: str, tensor: Tensor, end: int) -> None:
    if len(tensor) and not (tensor.min() >= 0 and tensor.max() < end):
        raise ModelError(f"tensor {name} must have numbers from 0 to {end - 1}")
