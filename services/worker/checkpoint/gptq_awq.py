"""Reads the quantised weights of GPTQ and AWQ checkpoints.

Instead of `weight`, a layer has tensors `qweight`, `qzeros`, `scales` and maybe `g_idx`. `PackedWeights` makes `weight`
from them, as quants for matmuls or as floats. Quants and zero points are packed into int32, the lowest bits first:

    GPTQ   qweight (in * bits / 32, out), along the inputs; qzeros (groups, out * bits / 32), along the outputs
    AWQ    qweight (in, out / 8) and qzeros (groups, out / 8), along the outputs in the order 0 2 4 6 1 3 5 7

`scales` are (groups, out). `g_idx` (in,) is the group of each input; a group's inputs need not be contiguous. Without
`g_idx` they are. They also are if `g_idx` is not plausible, since some tools fill it with zeros.
"""

from collections.abc import Mapping
from typing import Literal, NamedTuple, Protocol

import torch
from torch import Tensor

from kernels.quantized import QUANT_GROUP_SIZE, QuantizedWeight, Rows, unpack_awq, unpack_words
from services.worker.checkpoint.quantization_config import QuantizationConfig
from shared.errors import ModelError

_SUFFIXES = (".qweight", ".qzeros", ".scales", ".g_idx")
_ALIGNMENT = 8  # outputs in an int32, of either number of bits
_SCALE_DTYPES = (torch.float16, torch.bfloat16, torch.float32)


class Shard(Protocol):
    """An opened file of tensors."""

    def keys(self) -> list[str]: ...

    def get_tensor(self, name: str) -> Tensor: ...

    def mapped(self, name: str) -> list[Tensor]:
        """Return the parts of mapped files that the tensor called `name` is read from; none if it is in memory."""
        ...


class _PackedMatrix(NamedTuple):
    """A module's tensors, whose shapes fit each other."""

    config: QuantizationConfig
    qweight: Tensor
    qzeros: Tensor
    scales: Tensor
    g_idx: Tensor  # (in,) int64
    shape: tuple[int, int]  # (out, in)

    @property
    def group_size(self) -> int:
        return self.shape[1] if self.config.group_size == -1 else self.config.group_size

    @property
    def zero_points(self) -> Tensor:
        """The zero points (out, groups) uint8."""
        if self.config.method == "gptq":
            zero_points = unpack_words(self.qzeros, self.config.bits).T.contiguous()
        else:
            zero_points = unpack_awq(self.qzeros)
        zero_points += self.config.zero_offset
        return zero_points.bitwise_and_(2**self.config.bits - 1)  # one of 0 may be stored as -1

    @property
    def quants(self) -> Tensor:
        """The quants (out, in) uint8."""
        if self.config.method == "awq":
            return unpack_awq(self.qweight)
        return unpack_words(self.qweight.T.contiguous(), self.config.bits)

    def outputs(self, first: int, end: int) -> "_PackedMatrix":
        """Return the matrix of some outputs. Both numbers must be multiples of those in an int32."""
        words = slice(first * self.config.bits // 32, end * self.config.bits // 32)
        columns = words if self.config.method == "awq" else slice(first, end)
        return self._replace(
            qweight=self.qweight[:, columns],
            qzeros=self.qzeros[:, words],
            scales=self.scales[:, first:end],
            shape=(end - first, self.shape[1]),
        )


class _DequantizedRows:
    """A matrix (out, in) in float32."""

    def __init__(self, matrix: _PackedMatrix) -> None:
        self._matrix = matrix

    @property
    def shape(self) -> tuple[int, ...]:
        return self._matrix.shape

    def __getitem__(self, rows: slice) -> Tensor:
        start, stop, _ = rows.indices(self.shape[0])
        first = start // _ALIGNMENT * _ALIGNMENT
        matrix = self._matrix.outputs(first, min(-(-stop // _ALIGNMENT) * _ALIGNMENT, self.shape[0]))
        floats = matrix.quants.float()
        floats -= matrix.zero_points.float()[:, matrix.g_idx]
        floats *= matrix.scales.T.float()[:, matrix.g_idx]
        return floats[start - first : stop - first]


class PackedWeights:
    """The packed matrices in `tensors`, a map from each tensor's name to its file.

    The constructor raises ModelError naming a tensor that is invalid.
    """

    def __init__(self, tensors: Mapping[str, Shard], config: QuantizationConfig) -> None:
        self._tensors, self._config = tensors, config
        modules = [name.removesuffix(".qweight") for name in tensors if name.endswith(".qweight")]
        if not modules:
            raise ModelError(
                f"config.json says {config.method}, but the weight files have no tensor with quants (qweight)"
            )
        self._matrices = {f"{module}.weight": self._matrix(module) for module in modules}
        self.packed_names = {module + suffix for module in modules for suffix in _SUFFIXES}

    def keys(self) -> list[str]:
        return list(self._matrices)

    def dtype(self, name: str) -> torch.dtype:
        """Return the type of the matrix's scales, which is what other programs compute in."""
        return self._matrices[name].scales.dtype

    def shape(self, name: str) -> tuple[int, ...]:
        """Return (outputs, inputs), even in families whose unquantised weights are transposed."""
        return self._matrices[name].shape

    def mapped(self, name: str) -> list[Tensor]:
        """Return the parts of mapped files that the matrix is read from, without g_idx, which is small."""
        module = name.removesuffix(".weight")
        names = [module + suffix for suffix in _SUFFIXES[:3]]
        return [mapped for tensor in names for mapped in self._tensors[tensor].mapped(tensor)]

    @property
    def method(self) -> Literal["gptq", "awq"]:
        return self._config.method

    def get_tensor(self, name: str) -> Tensor:
        """Return the matrix in float32."""
        return self.dequantized_rows(name)[:]

    def dequantized_rows(self, name: str) -> Rows:
        """Return the matrix (outputs, inputs) in float32."""
        return _DequantizedRows(self._matrices[name])

    def get_quantized(self, name: str) -> QuantizedWeight | None:
        """Return the matrix with its quants in the file; None if its scales do not fit float16.

        If groups are not of neighbouring inputs in order, inputs are to be permuted. One zero point for the whole
        matrix is exact. Zero points that differ become mins, -zero_point * scale rounded to float16. The error is at
        most 2**-11 of the min: with 4 bits, at most a 128th of the scale.
        """
        matrix = self._matrices[name]
        scales, zero_points = matrix.scales.half(), matrix.zero_points
        if not torch.equal(scales.float(), matrix.scales.float()):
            return None
        zero_point, mins = int(zero_points.view(-1)[0]), None
        if not (zero_points == zero_point).all():
            mins, zero_point = (zero_points.float() * -matrix.scales.T.float()).half(), 0
            if not mins.isfinite().all():
                return None
        in_order = torch.equal(matrix.g_idx, torch.arange(matrix.shape[1]) // matrix.group_size)
        order = None if in_order else matrix.g_idx.argsort(stable=True)
        layout, bits, group_size = self._config.method, self._config.bits, matrix.group_size
        return QuantizedWeight(bits, matrix.qweight, scales.T, mins, zero_point, order, layout, group_size)

    def _matrix(self, module: str) -> _PackedMatrix:
        qweight, qzeros, scales = (self._read(module + suffix) for suffix in _SUFFIXES[:3])
        for tensor, name in ((qweight, "qweight"), (qzeros, "qzeros")):
            if tensor.dtype != torch.int32 or tensor.ndim != 2:
                raise ModelError(f"tensor {module}.{name} must be a matrix of int32, and is {_describe(tensor)}")
        if scales.dtype not in _SCALE_DTYPES or scales.ndim != 2:
            raise ModelError(f"tensor {module}.scales must be a matrix of floats, and is {_describe(scales)}")
        pack_factor = 32 // self._config.bits
        rows, columns = qweight.shape
        if self._config.method == "gptq":
            outputs, inputs = columns, rows * pack_factor
        else:
            outputs, inputs = columns * pack_factor, rows
        group_size = inputs if self._config.group_size == -1 else self._config.group_size
        groups = -(-inputs // group_size)
        _check_shape(f"{module}.scales", scales, (groups, outputs))
        _check_shape(f"{module}.qzeros", qzeros, (groups, outputs // pack_factor))
        if inputs % QUANT_GROUP_SIZE or outputs % pack_factor:
            raise ModelError(f"tensor {module}.qweight is of {inputs} inputs and {outputs} outputs: not whole groups")
        g_idx = self._g_idx(module, inputs, group_size, groups)
        return _PackedMatrix(self._config, qweight.contiguous(), qzeros, scales, g_idx, (outputs, inputs))

    def _g_idx(self, module: str, inputs: int, group_size: int, groups: int) -> Tensor:
        """Return the group of each input (in,): `g_idx` if its groups have the right sizes, else contiguous groups.

        `desc_act` is not trusted if `g_idx` is valid. If it is set, an invalid `g_idx` is an error unless all zeros.
        """
        name, contiguous = f"{module}.g_idx", torch.arange(inputs) // group_size
        if name not in self._tensors:
            return contiguous
        g_idx = self._read(name)
        _check_shape(name, g_idx, (inputs,))
        if g_idx.is_floating_point() or int(g_idx.min()) < 0 or int(g_idx.max()) >= groups:
            raise ModelError(f"tensor {name} must name groups from 0 to {groups - 1}")
        if torch.equal(g_idx.long().bincount(minlength=groups), contiguous.bincount()):
            return g_idx.long()
        if self._config.desc_act and g_idx.any():
            raise ModelError(f"tensor {name} must give each group {group_size} inputs")
        return contiguous

    def _read(self, name: str) -> Tensor:
        if name not in self._tensors:
            raise ModelError(f"tensor {name} is missing")
        return self._tensors[name].get_tensor(name)


def _check_shape(name: str, tensor: Tensor, shape: tuple[int, ...]) -> None:
    if tuple(tensor.shape) != shape:
        raise ModelError(f"tensor {name} has shape {list(tensor.shape)}, and its quants need {list(shape)}")


def _describe(tensor: Tensor) -> str:
    return f"{tensor.dtype} {list(tensor.shape)}"
