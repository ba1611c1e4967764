"""Reads the quantised weights of GPTQ and AWQ checkpoints.

Instead of `weight`, a layer has tensors `qweight`, `qzeros`, `scales` and maybe `g_idx`, of which `GPTQAWQWeights`
makes `weight`, as quants for matmuls or as floats. Quants and zero points are packed into int32, the lowest bits first:

    GPTQ   qweight (in * bits / 32, out), along the inputs; qzeros (groups, out * bits / 32), along the outputs
    AWQ    qweight (in, out / 8) and qzeros (groups, out / 8), along the outputs in the order 0 2 4 6 1 3 5 7

`scales` are (groups, out). `g_idx` (in,) is the group of each input; a group's inputs need not be contiguous. Without
`g_idx` they are. They also are if `g_idx` is not plausible, since some tools fill it with zeros.
"""

from collections.abc import Mapping
from typing import Literal, NamedTuple

import torch
from torch import Tensor

from kernels.quantized import QUANT_GROUP_SIZE, Layout, QuantizedWeight, Rows, unpack_awq, unpack_words
from services.worker.checkpoint.quantization_config import QuantizationConfig
from services.worker.checkpoint.shard import SCALE_DTYPES, Shard, describe, quantized_modules, read_tensor
from shared.errors import ModelError
from shared.gguf.tensor_data import Region

_SUFFIXES = (".qweight", ".qzeros", ".scales", ".g_idx")
_ALIGNMENT = 8  # outputs in an int32, of either number of bits
_INDEX_DTYPES = (torch.int8, torch.uint8, torch.int16, torch.int32, torch.int64)


class _PackedMatrix(NamedTuple):
    """A module's tensors, whose shapes fit each other."""

    config: QuantizationConfig
    qweight: Tensor
    qzeros: Tensor
    scales: Tensor
    g_idx: Tensor  # (in,) int64
    shape: tuple[int, int]  # (out, in)
    group_size: int  # inputs

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

    def inputs(self, first: int, end: int) -> "_PackedMatrix":
        """Return the matrix of some inputs. Both numbers must be multiples of those in an int32."""
        words = slice(first * self.config.bits // 32, end * self.config.bits // 32)
        rows = slice(first, end) if self.config.method == "awq" else words
        return self._replace(
            qweight=self.qweight[rows], g_idx=self.g_idx[first:end], shape=(self.shape[0], end - first)
        )

    def split_groups(self, numbers: Tensor) -> "_PackedMatrix":
        """Return the matrix with groups of QUANT_GROUP_SIZE inputs. `numbers` has the present group of each."""
        return self._replace(qzeros=self.qzeros[numbers], scales=self.scales[numbers], group_size=QUANT_GROUP_SIZE)


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


class GPTQAWQWeights:
    """The packed matrices in `tensors`, a map from each tensor's name to its file.

    The constructor raises ModelError naming a tensor that is invalid.
    """

    def __init__(self, tensors: Mapping[str, Shard], config: QuantizationConfig) -> None:
        self._tensors, self._config = tensors, config
        modules = quantized_modules(tensors, config.method)
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

    def mapped(self, name: str, region: Region = ()) -> list[Tensor]:
        """Return the parts of mapped files that the matrix is read from, without g_idx, which is small."""
        module, part = name.removesuffix(".weight"), self._part(name, region)
        tensors = zip(_SUFFIXES, (part.qweight, part.qzeros, part.scales), strict=False)
        return [tensor for suffix, tensor in tensors if self._tensors[module + suffix].mapped(module + suffix)]

    @property
    def method(self) -> Literal["gptq", "awq", "squeezellm"]:
        return self._config.method

    def get_tensor(self, name: str, region: Region = ()) -> Tensor:
        """Return the matrix in float32."""
        return self.dequantized_rows(name, region)[:]

    def dequantized_rows(self, name: str, region: Region = ()) -> Rows:
        """Return the matrix (outputs, inputs) in float32."""
        return _DequantizedRows(self._part(name, region))

    def get_quantized(self, name: str, region: Region = ()) -> QuantizedWeight | None:
        """Return the matrix with its quants in the file; None if its scales do not fit float16, or if 32 of a region's
        inputs do not share one.

        If groups are not of neighbouring inputs in order, inputs are to be permuted. One zero point for the whole
        matrix is exact. Zero points that differ become mins, -zero_point * scale rounded to float16. The error is at
        most 2**-11 of the min: with 4 bits, at most a 128th of the scale.
        """
        matrix = self._part(name, region)
        in_order = bool((matrix.g_idx.diff() >= 0).all())
        order = None if in_order else matrix.g_idx.argsort(stable=True)
        if matrix.shape[1] < self.shape(name)[1]:  # its groups may begin or end outside
            blocks = (matrix.g_idx if order is None else matrix.g_idx[order]).view(-1, QUANT_GROUP_SIZE)
            if not (blocks == blocks[:, :1]).all():
                return None
            matrix = matrix.split_groups(blocks[:, 0])
        scales, zero_points = matrix.scales.half(), matrix.zero_points
        if not torch.equal(scales.float(), matrix.scales.float()):
            return None
        zero_point, mins = int(zero_points.view(-1)[0]), None
        if not (zero_points == zero_point).all():
            mins, zero_point = (zero_points.float() * -matrix.scales.T.float()).half(), 0
            if not mins.isfinite().all():
                return None
        layout: Layout = "awq" if self._config.method == "awq" else "gptq"
        return QuantizedWeight(
            self._config.bits, matrix.qweight, scales.T, mins, zero_point, order, layout, matrix.group_size
        )

    def _part(self, name: str, region: Region) -> _PackedMatrix:
        """Return what `region` takes of the outputs and the inputs of a matrix. Groups keep their numbers."""
        matrix, pack_factor = self._matrices[name], 32 // self._config.bits
        if not region:
            return matrix
        outputs, inputs = region
        if any(bound % pack_factor for side in region for bound in (side.start, side.stop)):
            raise ModelError(
                f"tensor {name.removesuffix('.weight')}.qweight: outputs {outputs.start} to {outputs.stop} and inputs "
                f"{inputs.start} to {inputs.stop}, a rank's part, are no whole words of {pack_factor} quants: try a "
                "smaller --tensor-parallel-size"
            )
        return matrix.outputs(outputs.start, outputs.stop).inputs(inputs.start, inputs.stop)

    def _matrix(self, module: str) -> _PackedMatrix:
        qweight, qzeros, scales = (read_tensor(self._tensors, module + suffix) for suffix in _SUFFIXES[:3])
        for tensor, name in ((qweight, "qweight"), (qzeros, "qzeros")):
            if tensor.dtype != torch.int32 or tensor.ndim != 2:
                raise ModelError(f"tensor {module}.{name} must be a matrix of int32, and is {describe(tensor)}")
        if scales.dtype not in SCALE_DTYPES or scales.ndim != 2:
            raise ModelError(f"tensor {module}.scales must be a matrix of floats, and is {describe(scales)}")
        pack_factor = 32 // self._config.bits
        rows, columns = qweight.shape
        if self._config.method == "gptq":
            outputs, inputs = columns, rows * pack_factor
        else:
            outputs, inputs = columns * pack_factor, rows
        if not inputs or not outputs or inputs % QUANT_GROUP_SIZE or outputs % pack_factor:
            raise ModelError(f"tensor {module}.qweight is of {inputs} inputs and {outputs} outputs: not whole groups")
        group_size = inputs if self._config.group_size == -1 else self._config.group_size
        groups = -(-inputs // group_size)
        _check_shape(f"{module}.scales", scales, (groups, outputs))
        _check_shape(f"{module}.qzeros", qzeros, (groups, outputs // pack_factor))
        g_idx = self._g_idx(module, inputs, group_size, groups)
        return _PackedMatrix(self._config, qweight.contiguous(), qzeros, scales, g_idx, (outputs, inputs), group_size)

    def _g_idx(self, module: str, inputs: int, group_size: int, groups: int) -> Tensor:
        """Return the group of each input (in,): `g_idx` if its groups have the right sizes, else contiguous groups.

        `desc_act` is not trusted if `g_idx` is valid. If it is set, an invalid `g_idx` is an error unless all zeros.
        """
        name, contiguous = f"{module}.g_idx", torch.arange(inputs) // group_size
        if name not in self._tensors:
            return contiguous
        g_idx = read_tensor(self._tensors, name)
        _check_shape(name, g_idx, (inputs,))
        if g_idx.dtype not in _INDEX_DTYPES or int(g_idx.min()) < 0 or int(g_idx.max()) >= groups:
            raise ModelError(f"tensor {name} must name groups from 0 to {groups - 1}")
        if torch.equal(g_idx.long().bincount(minlength=groups), contiguous.bincount()):
            return g_idx.long()
        if self._config.desc_act and g_idx.any():
            raise ModelError(f"tensor {name} must give each group {group_size} inputs")
        return contiguous


def _check_shape(name: str, tensor: Tensor, shape: tuple[int, ...]) -> None:
    if tuple(tensor.shape) != shape:
        raise ModelError(f"tensor {name} has shape {list(tensor.shape)}, and its quants need {list(shape)}")
