"""Checkpoints of packed integers, written bit by bit as GPTQ's and AWQ's formats are described.

What a weight loses by being quantised is lost in the model too, so that the model is what the checkpoint stands for.
"""

import json
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

AWQ_ORDER = (0, 2, 4, 6, 1, 3, 5, 7)  # the output whose code is the lowest four bits, the next ...


class Way(NamedTuple):
    """How matrices are quantised, and written."""

    method: str = "gptq"
    bits: int = 4
    group: int = 32
    symmetric: bool = True
    layout: str = "gptq"  # checkpoint_format
    act_order: bool = False  # groups are of inputs that do not lie side by side
    scales: torch.dtype = torch.float16
    order: int = 0  # a seed
    g_idx: str = "true"  # or "zeros", as tools write that have no use for it, or "absent"

    @property
    def config(self) -> dict[str, Any]:
        if self.method == "awq":
            shared = {"bits": self.bits, "group_size": self.group, "zero_point": True, "version": "gemm"}
        else:
            shared = {"bits": self.bits, "group_size": self.group, "desc_act": self.act_order, "sym": self.symmetric}
            shared["checkpoint_format"] = self.layout
        return {"quant_method": self.method, **shared}


class Quantised(NamedTuple):
    codes: NDArray[np.int64]  # (in, out)
    zeros: NDArray[np.int64]  # (groups, out)
    scales: Tensor  # (groups, out)
    group: NDArray[np.int64]  # (in,)

    def weight(self) -> Tensor:
        """(out, in)"""
        codes, zeros = torch.tensor(self.codes), torch.tensor(self.zeros)[self.group]
        return ((codes - zeros).float() * self.scales.float()[self.group]).T.contiguous()


def quantise(weight: Tensor, way: Way) -> Quantised:
    """`weight` (out, in), each group from its least to its greatest, or around zero."""
    inputs = weight.shape[1]
    size = inputs if way.group == -1 else way.group
    group = np.arange(inputs) // size
    if way.act_order:  # matrices with the same inputs get the same
        group = np.random.default_rng(way.order + inputs).permutation(group)
    most, scales, zeros = 2**way.bits - 1, [], []
    for number in range(int(group.max()) + 1):
        part = weight[:, group == number]
        if way.symmetric:
            scales.append(part.abs().amax(1) * 2 / most)
            zeros.append(torch.full((len(part),), 2 ** (way.bits - 1)))
        else:
            least, greatest = part.amin(1).clamp_max(0), part.amax(1).clamp_min(0)
            scales.append((greatest - least) / most)
            zeros.append((-least / scales[-1]).round().clamp(0, most))
    steps = torch.stack(scales).to(way.scales)
    points = torch.stack(zeros).long().numpy()
    codes = (weight.T / steps.float()[group]).round().long().numpy() + points[group]
    return Quantised(codes.clip(0, most), points, steps, group)


def gptq_tensors(found: Quantised, way: Way) -> dict[str, Tensor]:
    """Eight codes of four bits, or four of eight, in an int32: of weights eight inputs, of zeros eight outputs."""
    each, offset = 32 // way.bits, 1 if way.layout == "gptq" else 0
    rows = [pack(found.codes[row : row + each], way.bits) for row in range(0, len(found.codes), each)]
    zeros = (found.zeros - offset) % 2**way.bits
    columns = [pack(zeros[:, at : at + each].T, way.bits) for at in range(0, zeros.shape[1], each)]
    tensors = {"qweight": torch.stack(rows), "qzeros": torch.stack(columns, 1), "scales": found.scales}
    group = torch.tensor(found.group, dtype=torch.int32)
    return tensors if way.g_idx == "absent" else tensors | {"g_idx": group * (way.g_idx == "true")}


def awq_tensors(found: Quantised) -> dict[str, Tensor]:
    """Eight outputs in an int32, of weights and zeros alike."""

    def packed(numbers: NDArray[np.int64]) -> Tensor:
        starts = range(0, numbers.shape[1], 8)
        return torch.stack([pack(np.stack([numbers[:, at + one] for one in AWQ_ORDER]), 4) for at in starts], 1)

    return {"qweight": packed(found.codes), "qzeros": packed(found.zeros), "scales": found.scales}


def pack(numbers: NDArray[np.int64], bits: int) -> Tensor:
    """int32 of which row i of `numbers` are the bits from i * `bits` on."""
    word = np.zeros(numbers.shape[1:], np.uint32)
    for place, row in enumerate(numbers):
        word |= row.astype(np.uint32) << np.uint32(place * bits)
    return torch.from_numpy(word.view(np.int32))


def save_packed(
    model: PreTrainedModel,
    folder: Path,
    way: Way,
    *,
    plain: Callable[[str], bool] = lambda name: name == "lm_head",
    other: Callable[[str], bool] = lambda name: False,
) -> Path:
    """`model` quantised, but for the modules that are to be `plain`; the model gets what is left of its weights.

    The modules that are `other` have their inputs in another order, where that is that of their activations.
    """
    chosen = {
        name: module
        for name, module in model.named_modules()
        if isinstance(module, torch.nn.Linear | Conv1D) and not plain(name)
    }
    packed: dict[str, Tensor] = {}
    for name, module in chosen.items():
        weight = module.weight.detach()
        found = quantise(
            weight if isinstance(module, torch.nn.Linear) else weight.T, way._replace(order=1) if other(name) else way
        )
        tensors = awq_tensors(found) if way.method == "awq" else gptq_tensors(found, way)
        packed |= {f"{name}.{kind}": tensor.contiguous() for kind, tensor in tensors.items()}
        whole = found.weight()
        weight.copy_(whole if isinstance(module, torch.nn.Linear) else whole.T)
    model.save_pretrained(folder)
    path = folder / "model.safetensors"
    tensors = {name: tensor for name, tensor in load_file(path).items() if name.removesuffix(".weight") not in chosen}
    save_file(tensors | packed, path)
    config = json.loads((folder / "config.json").read_bytes()) | {"quantization_config": way.config}
    (folder / "config.json").write_text(json.dumps(config))
    return folder
