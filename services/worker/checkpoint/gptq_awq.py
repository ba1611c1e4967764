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

from kernels.quantized import QUANT_GROUP_SIZE, QuantizedWeight
from services.worker.checkpoint.quantization_config import QuantizationConfig
from shared.errors import ModelError

_SUFFIXES = (".qweight", ".qzeros", ".scales", ".g_idx")
_AWQ_ORDER = (0, 2, 4, 6, 1, 3, 5, 7)
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

    qweight: Tensor
    qzeros: Tensor
    scales: Tensor
    g_idx: Tensor  # (in,) int64
    shape: tuple[int, int]  # (out, in)


class _Unpacked(NamedTuple):
    """A module's weight, one element for each quant."""

    quants: Tensor  # (out, in) uint8
    zero_points: Tensor  # (out, groups) uint8
    scales: Tensor  # (out, groups)
    g_idx: Tensor  # (in,) int64, below groups


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
        """Return what is mapped of the matrix's quants; its other tensors are small, or in memory."""
        qweight = f"{name.removesuffix('.weight')}.qweight"
        return self._tensors[qweight].mapped(qweight)

    @property
    def method(self) -> Literal["gptq", "awq", "squeezellm"]:
        return self._config.method

    def get_tensor(self, name: str) -> Tensor:
        """Return the matrix in float32."""
        quants, zero_points, scales, g_idx = self._unpack(name)
        floats = quants.float()
        floats -= zero_points.float()[:, g_idx]
        floats *= scales.float()[:, g_idx]
        return floats

    def get_quantized(self, name: str) -> QuantizedWeight | None:
        """Return the matrix with its quants; None if 32 adjacent inputs do not share a scale that fits float16.

        If g_idx scatters a group's inputs, the inputs are permuted to make it contiguous. One zero point for the whole
        matrix is exact. Zero points that differ become mins, -zero_point * scale rounded to float16. The error is at
        most 2**-11 of the min: with 4 bits, at most a 128th of the scale.
        """
        quants, zero_points, scales, g_idx = self._unpack(name)
        order = None if _in_whole_groups(g_idx) else g_idx.argsort(stable=True)
        if order is not None:
            quants, g_idx = quants[:, order], g_idx[order]
        half_scales = scales.half()
        if not _in_whole_groups(g_idx) or not torch.equal(half_scales.float(), scales.float()):
            return None
        groups, zero_point, mins = g_idx[::QUANT_GROUP_SIZE], int(zero_points.view(-1)[0]), None
        if not (zero_points == zero_point).all():
            mins, zero_point = (zero_points.float() * -scales.float()).half()[:, groups], 0
            if not mins.isfinite().all():
                return None
        return QuantizedWeight(self._config.bits, quants, half_scales[:, groups], mins, zero_point, order)

    def _unpack(self, name: str) -> _Unpacked:
        qweight, qzeros, scales, g_idx, _ = self._matrices[name]
        bits = self._config.bits
        if self._config.method == "gptq":
            quants, zero_points = _unpack(qweight.T.contiguous(), bits), _unpack(qzeros, bits).T.contiguous()
        else:
            quants, zero_points = _unpack_awq(qweight), _unpack_awq(qzeros)
        zero_points = zero_points + self._config.zero_offset & 2**bits - 1  # a zero point of 0 may be stored as -1
        return _Unpacked(quants, zero_points, scales.T.contiguous(), g_idx)

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
        return _PackedMatrix(
            qweight, qzeros, scales, self._g_idx(module, inputs, group_size, groups), (outputs, inputs)
        )

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


def _in_whole_groups(g_idx: Tensor) -> bool:
    """Return whether every 32 adjacent inputs belong to one group."""
    blocks = g_idx.view(-1, QUANT_GROUP_SIZE)
    return bool((blocks == blocks[:, :1]).all())


def _unpack(packed: Tensor, bits: int) -> Tensor:
    """Unpack int32 words `packed` (R, C), lowest bits first, to uint8 quants (R, C * 32 / bits)."""
    octets = packed.contiguous().view(torch.uint8)
    return octets if bits == 8 else torch.stack((octets & 15, octets >> 4), -1).flatten(1)


def _unpack_awq(packed: Tensor) -> Tensor:
    """Unpack and transpose int32 words `packed` (R, C) to uint8 quants (C * 8, R)."""
    words = packed.T.contiguous()
    quants = torch.empty(len(words), 8, words.shape[1], dtype=torch.uint8)
    for index, output in enumerate(_AWQ_ORDER):
        quants[:, output] = words >> 4 * index & 15
    return quants.flatten(0, 1)


def _check_shape(name: str, tensor: Tensor, shape: tuple[int, ...]) -> None:
    if tuple(tensor.shape) != shape:
        raise ModelError(f"tensor {name} has shape {list(tensor.shape)}, and its quants need {list(shape)}")


def _describe(tensor: Tensor) -> str:
    return f"{tensor.dtype} {list(tensor.shape)}"
