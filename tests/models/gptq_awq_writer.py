"""Writes GPTQ and AWQ checkpoints of transformers models, bit by bit as the formats are described.

The model gets the dequantised weights, so that it stays the reference for the checkpoint.
"""

from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import PreTrainedModel
from transformers.pytorch_utils import Conv1D

from tests.models.tiny_models import set_config

AWQ_ORDER = (0, 2, 4, 6, 1, 3, 5, 7)  # outputs in the order of their quants, from the lowest four bits on


class Scheme(NamedTuple):
    """The settings by which matrices are quantised and written."""

    method: str = "gptq"
    bits: int = 4
    group_size: int = 32
    symmetric: bool = True
    layout: str = "gptq"  # checkpoint_format
    act_order: bool = False  # the inputs of a group are not neighbours
    scales: torch.dtype = torch.float16
    seed: int = 0  # of the permutation of inputs, with act_order
    g_idx: str = "true"  # or "zeros", which some tools write where it is unused, or "absent"

    @property
    def config(self) -> dict[str, Any]:
        if self.method == "awq":
            settings = {"bits": self.bits, "group_size": self.group_size, "zero_point": True, "version": "gemm"}
        else:
            settings = {"bits": self.bits, "group_size": self.group_size}
            settings |= {"desc_act": self.act_order, "sym": self.symmetric, "checkpoint_format": self.layout}
        return {"quant_method": self.method, **settings}


class Quantized(NamedTuple):
    quants: NDArray[np.int64]  # (in, out)
    zero_points: NDArray[np.int64]  # (groups, out)
    scales: Tensor  # (groups, out)
    g_idx: NDArray[np.int64]  # (in,)

    def weight(self) -> Tensor:
        """Return the weight (out, in) that the quants stand for."""
        quants, zero_points = torch.tensor(self.quants), torch.tensor(self.zero_points)[self.g_idx]
        return ((quants - zero_points).float() * self.scales.float()[self.g_idx]).T.contiguous()


def quantize(weight: Tensor, scheme: Scheme) -> Quantized:
    """Quantise `weight` (out, in), each group from its minimum to its maximum, or around zero."""
    inputs = weight.shape[1]
    group_size = inputs if scheme.group_size == -1 else scheme.group_size
    g_idx = np.arange(inputs) // group_size
    if scheme.act_order:  # the same permutation for all matrices of as many inputs
        g_idx = np.random.default_rng(scheme.seed + inputs).permutation(g_idx)
    largest, scales, zero_points = 2**scheme.bits - 1, [], []
    for number in range(int(g_idx.max()) + 1):
        group = weight[:, g_idx == number]
        if scheme.symmetric:
            scales.append(group.abs().amax(1) * 2 / largest)
            zero_points.append(torch.full((len(group),), 2 ** (scheme.bits - 1)))
        else:
            least, greatest = group.amin(1).clamp_max(0), group.amax(1).clamp_min(0)
            scales.append((greatest - least) / largest)
            zero_points.append((-least / scales[-1]).round().clamp(0, largest))
    stored_scales = torch.stack(scales).to(scheme.scales)
    points = torch.stack(zero_points).long().numpy()
    quants = (weight.T / stored_scales.float()[g_idx]).round().long().numpy() + points[g_idx]
    return Quantized(quants.clip(0, largest), points, stored_scales, g_idx)


def gptq_tensors(matrix: Quantized, scheme: Scheme) -> dict[str, Tensor]:
    """Pack eight quants of 4 bits, or four of 8, in an int32: eight inputs of weights, eight outputs of zero points."""
    pack_factor, offset = 32 // scheme.bits, 1 if scheme.layout == "gptq" else 0
    starts = range(0, len(matrix.quants), pack_factor)
    rows = [pack(matrix.quants[start : start + pack_factor], scheme.bits) for start in starts]
    zeros = (matrix.zero_points - offset) % 2**scheme.bits
    starts = range(0, zeros.shape[1], pack_factor)
    columns = [pack(zeros[:, start : start + pack_factor].T, scheme.bits) for start in starts]
    tensors = {"qweight": torch.stack(rows), "qzeros": torch.stack(columns, 1), "scales": matrix.scales}
    g_idx = torch.tensor(matrix.g_idx, dtype=torch.int32)
    return tensors if scheme.g_idx == "absent" else tensors | {"g_idx": g_idx * (scheme.g_idx == "true")}


def awq_tensors(matrix: Quantized) -> dict[str, Tensor]:
    """Pack eight outputs in an int32, of weights and zero points alike."""

    def packed(numbers: NDArray[np.int64]) -> Tensor:
        starts = range(0, numbers.shape[1], 8)
        return torch.stack([pack(np.stack([numbers[:, at + one] for one in AWQ_ORDER]), 4) for at in starts], 1)

    return {"qweight": packed(matrix.quants), "qzeros": packed(matrix.zero_points), "scales": matrix.scales}


def pack(numbers: NDArray[np.int64], bits: int) -> Tensor:
    """Return int32 values in which row i of `numbers` fills the bits from i * `bits` on."""
    word = np.zeros(numbers.shape[1:], np.uint32)
    for place, row in enumerate(numbers):
        word |= row.astype(np.uint32) << np.uint32(place * bits)
    return torch.from_numpy(word.view(np.int32))


def save_packed(
    model: PreTrainedModel,
    folder: Path,
    scheme: Scheme,
    *,
    plain: Callable[[str], bool] = lambda name: name == "lm_head",
    other: Callable[[str], bool] = lambda name: False,
) -> Path:
    """Save `model` quantised, except for the modules that are `plain`, and give it the dequantised weights.

    With act_order, the modules that are `other` get another permutation of their inputs.
    """

    def quantize_module(name: str, weight: Tensor) -> tuple[dict[str, Tensor], Tensor]:
        matrix = quantize(weight, scheme._replace(seed=1) if other(name) else scheme)
        tensors = awq_tensors(matrix) if scheme.method == "awq" else gptq_tensors(matrix, scheme)
        return {suffix: tensor.contiguous() for suffix, tensor in tensors.items()}, matrix.weight()

    save_quantized(model, folder, quantize_module, plain)
    set_config(folder, quantization_config=scheme.config)
    return folder


def save_quantized(
    model: PreTrainedModel,
    folder: Path,
    quantize_module: Callable[[str, Tensor], tuple[dict[str, Tensor], Tensor]],
    plain: Callable[[str], bool],
) -> None:
    """Save `model` with other tensors in place of its weights (out, in), except for the modules that are `plain`.

    `quantize_module` returns these, by suffix, for a module's name and weight, and the weight that they stand for. The
    model gets the latter.
    """
    modules = {
        name: module
        for name, module in model.named_modules()
        if isinstance(module, torch.nn.Linear | Conv1D) and not plain(name)
    }
    packed: dict[str, Tensor] = {}
    for name, module in modules.items():
        weight = module.weight.detach()
        outputs_first = weight if isinstance(module, torch.nn.Linear) else weight.T
        tensors, dequantized = quantize_module(name, outputs_first.clone())
        packed |= {f"{name}.{suffix}": tensor for suffix, tensor in tensors.items()}
        outputs_first.copy_(dequantized)
    model.save_pretrained(folder)
    path = folder / "model.safetensors"
    tensors = {name: tensor for name, tensor in load_file(path).items() if name.removesuffix(".weight") not in modules}
    save_file(tensors | packed, path)
