"""Matrices that a checkpoint has as packed integers, under the names that their weights would have.

A module has tensors `qweight`, `qzeros` and `scales`, and maybe `g_idx`, of which `weight` is made here: as codes that
the products take, or as floats. Codes and zeros are bits of int32, the lowest first:

    GPTQ   qweight (in * bits / 32, out), along the inputs; qzeros (groups, out * bits / 32), along the outputs
    AWQ    qweight (in, out / 8) and qzeros (groups, out / 8), along the outputs in the order 0 2 4 6 1 3 5 7

`scales` are (groups, out). `g_idx` (in,) says which group an input belongs to; they need not lie side by side. Without
it they do, and so they do where it cannot be meant: some tools write zeros there.
"""

from collections.abc import Mapping
from typing import Literal, NamedTuple, Protocol

import torch
from torch import Tensor

from kernels.quantized import QUANT_GROUP_SIZE, QuantizedWeight
from services.worker.checkpoint.quantization_config import PackedFormat
from shared.errors import ModelError

_SUFFIXES = (".qweight", ".qzeros", ".scales", ".g_idx")
_AWQ_ORDER = (0, 2, 4, 6, 1, 3, 5, 7)
_STEPS = (torch.float16, torch.bfloat16, torch.float32)


class Shard(Protocol):
    """One opened file."""

    def keys(self) -> list[str]: ...

    def get_tensor(self, name: str) -> Tensor: ...


class _Matrix(NamedTuple):
    """A module's tensors, whose shapes fit each other."""

    qweight: Tensor
    qzeros: Tensor
    scales: Tensor
    group: Tensor  # (in,) int64
    shape: tuple[int, int]  # (out, in)


class _Unpacked(NamedTuple):
    codes: Tensor  # (out, in) uint8
    zeros: Tensor  # (out, groups) uint8
    scales: Tensor  # (out, groups)
    group: Tensor  # (in,) int64, below groups


class PackedWeights:
    """All packed matrices among the `tensors` (each with the file it is in). Raises ModelError naming a wrong one."""

    def __init__(self, tensors: Mapping[str, Shard], how: PackedFormat) -> None:
        self._tensors, self._how = tensors, how
        modules = [name.removesuffix(".qweight") for name in tensors if name.endswith(".qweight")]
        if not modules:
            raise ModelError(f"config.json says {how.method}, but the weight files have no tensor with codes (qweight)")
        self._matrices = {f"{module}.weight": self._matrix(module) for module in modules}
        self.parts = {module + suffix for module in modules for suffix in _SUFFIXES}

    def keys(self) -> list[str]:
        return list(self._matrices)

    def dtype(self, name: str) -> torch.dtype:
        """The type of its scales, in which other programs compute with it."""
        return self._matrices[name].scales.dtype

    def shape(self, name: str) -> tuple[int, ...]:
        """(outputs, inputs), also in families whose plain checkpoints have them the other way round."""
        return self._matrices[name].shape

    @property
    def method(self) -> Literal["gptq", "awq"]:
        return self._how.method

    def get_tensor(self, name: str) -> Tensor:
        """The matrix in float32."""
        codes, zeros, scales, group = self._unpack(name)
        wide = codes.float()
        wide -= zeros.float()[:, group]
        wide *= scales.float()[:, group]
        return wide

    def get_quantized(self, name: str) -> QuantizedWeight | None:
        """The matrix in its own bits; None if it has no groups of 32 inputs of one step each, or that is no float16.

        Groups of scattered inputs are put side by side. A zero that all of a matrix share is exact. Zeros that differ
        become leasts, zero * step rounded to float16: an error of at most 2**-11 of that, which is a 128th of a step of
        4 bits.
        """
        codes, zeros, scales, group = self._unpack(name)
        order = None if _whole(group) else group.argsort(stable=True)
        if order is not None:
            codes, group = codes[:, order], group[order]
        steps = scales.half()
        if not _whole(group) or not torch.equal(steps.float(), scales.float()):
            return None
        places, shared, leasts = group[::QUANT_GROUP_SIZE], int(zeros.view(-1)[0]), None
        if not (zeros == shared).all():
            leasts, shared = (zeros.float() * -scales.float()).half()[:, places], 0
            if not leasts.isfinite().all():
                return None
        return QuantizedWeight(self._how.bits, codes, steps[:, places], leasts, shared, order)

    def _unpack(self, name: str) -> _Unpacked:
        qweight, qzeros, scales, group, _ = self._matrices[name]
        bits = self._how.bits
        if self._how.method == "gptq":
            codes, zeros = _unpacked(qweight.T.contiguous(), bits), _unpacked(qzeros, bits).T.contiguous()
        else:
            codes, zeros = _unpacked_awq(qweight), _unpacked_awq(qzeros)
        zeros = zeros + self._how.zero_offset & 2**bits - 1  # a zero of 0 was stored as the largest code
        return _Unpacked(codes, zeros, scales.T.contiguous(), group)

    def _matrix(self, module: str) -> _Matrix:
        qweight, qzeros, scales = (self._read(module + suffix) for suffix in _SUFFIXES[:3])
        for tensor, name in ((qweight, "qweight"), (qzeros, "qzeros")):
            if tensor.dtype != torch.int32 or tensor.ndim != 2:
                raise ModelError(f"tensor {module}.{name} must be a matrix of int32, and is {_described(tensor)}")
        if scales.dtype not in _STEPS or scales.ndim != 2:
            raise ModelError(f"tensor {module}.scales must be a matrix of floats, and is {_described(scales)}")
        packed = 32 // self._how.bits
        rows, columns = qweight.shape
        outputs, inputs = (columns, rows * packed) if self._how.method == "gptq" else (columns * packed, rows)
        size = inputs if self._how.group_size == -1 else self._how.group_size
        groups = -(-inputs // size)
        _expect(f"{module}.scales", scales, (groups, outputs))
        _expect(f"{module}.qzeros", qzeros, (groups, outputs // packed))
        if inputs % QUANT_GROUP_SIZE or outputs % packed:
            raise ModelError(f"tensor {module}.qweight is of {inputs} inputs and {outputs} outputs: not whole groups")
        return _Matrix(qweight, qzeros, scales, self._group(module, inputs, size, groups), (outputs, inputs))

    def _group(self, module: str, inputs: int, size: int, groups: int) -> Tensor:
        """Return the group of each input (in,): `g_idx` where it gives every group its number of inputs, as all that
        is meant does, whatever `desc_act` says; else inputs side by side, if that is a way to read it.
        """
        name, side_by_side = f"{module}.g_idx", torch.arange(inputs) // size
        if name not in self._tensors:
            return side_by_side
        group = self._read(name)
        _expect(name, group, (inputs,))
        if group.is_floating_point() or int(group.min()) < 0 or int(group.max()) >= groups:
            raise ModelError(f"tensor {name} must name groups from 0 to {groups - 1}")
        if torch.equal(group.long().bincount(minlength=groups), side_by_side.bincount()):
            return group.long()
        if self._how.desc_act and group.any():
            raise ModelError(f"tensor {name} must give each group {size} inputs")
        return side_by_side

    def _read(self, name: str) -> Tensor:
        if name not in self._tensors:
            raise ModelError(f"tensor {name} is missing")
        return self._tensors[name].get_tensor(name)


def _whole(group: Tensor) -> bool:
    """Whether inputs 32 by 32 belong to one group each."""
    blocks = group.view(-1, QUANT_GROUP_SIZE)
    return bool((blocks == blocks[:, :1]).all())


def _unpacked(packed: Tensor, bits: int) -> Tensor:
    """(R, C) int32 to the (R, C * 32 / bits) codes that are its bits, the lowest first, as uint8."""
    parts = packed.contiguous().view(torch.uint8)
    return parts if bits == 8 else torch.stack((parts & 15, parts >> 4), -1).flatten(1)


def _unpacked_awq(packed: Tensor) -> Tensor:
    """(R, C) int32 to the (C * 8, R) codes that are its bits, as uint8."""
    words = packed.T.contiguous()
    codes = torch.empty(len(words), 8, words.shape[1], dtype=torch.uint8)
    for place, output in enumerate(_AWQ_ORDER):
        codes[:, output] = words >> 4 * place & 15
    return codes.flatten(0, 1)


def _expect(name: str, tensor: Tensor, shape: tuple[int, ...]) -> None:
    if tuple(tensor.shape) != shape:
        raise ModelError(f"tensor {name} has shape {list(tensor.shape)}, and its codes ask for {list(shape)}")


def _described(tensor: Tensor) -> str:
    return f"{tensor.dtype} {list(tensor.shape)}"
