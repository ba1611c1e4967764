"""Writes SqueezeLLM checkpoints of transformers models, bit by bit as the format is described.

The model gets the dequantised weights, so that it stays the reference for the checkpoint.
"""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import torch
from safetensors.torch import load_file
from torch import Tensor
from transformers import PreTrainedModel

from tests.models.gptq_awq_writer import pack, save_quantized
from tests.models.tiny_models import set_config

CONFIG = {"quant_method": "squeezellm", "wbits": 4}


class TableScheme(NamedTuple):
    """How matrices are quantised and written."""

    outliers: float = 0.0  # the share of weights that are stored beside the codes
    full_rows: int = 0  # outputs whose outliers are stored in whole
    tables: torch.dtype = torch.float16


def quantize(weight: Tensor, scheme: TableScheme) -> tuple[dict[str, Tensor], Tensor]:
    """Return the tensors of `weight` (out, in), and the weight that they stand for.

    An output's table has sixteen quantiles of its weights, and no even steps. Outliers, its largest ones, are left out
    of it; their codes are those of 0, and the stored outlier is the rest.
    """
    magnitudes = weight.abs()
    is_outlier = magnitudes > magnitudes.quantile(1 - scheme.outliers)
    dense = weight.masked_fill(is_outlier, 0.0)
    tables = dense.quantile((torch.arange(16) + 0.5) / 16, dim=1).T.contiguous().to(scheme.tables)
    codes = (dense[..., None] - tables.float()[:, None]).abs().argmin(-1)
    looked_up = tables.float().gather(1, codes)
    sparse = torch.where(is_outlier, weight - looked_up, 0.0)
    whole = is_outlier.sum(1).topk(scheme.full_rows).indices
    words = [pack(codes.T[k : k + 8].numpy(), 4) for k in range(0, weight.shape[1], 8)]
    tensors = {"qweight": torch.stack(words), "lookup_table": tables}
    if scheme.full_rows:
        tensors |= {"full_rows": sparse[whole].T.contiguous(), "full_row_indices": whole.int()}
    if scheme.outliers:
        rest = sparse.clone()
        rest[whole] = 0.0
        counts = (rest != 0).sum(1)
        rows = torch.cat((torch.zeros(1), counts.cumsum(0))).int()
        tensors |= {"rows": rows, "cols": rest.nonzero()[:, 1].int(), "vals": rest[rest != 0]}
        tensors["startrows"] = torch.zeros(128, dtype=torch.int32)
    return tensors, looked_up + sparse


def save_tables(
    model: PreTrainedModel,
    folder: Path,
    scheme: TableScheme,
    *,
    plain: Callable[[str], bool] = lambda name: name == "lm_head",
) -> Path:
    """Save `model` quantised, except for the modules that are `plain`, and give it the dequantised weights."""
    save_quantized(model, folder, lambda _, weight: quantize(weight, scheme), plain)
    set_config(folder, quantization_config=CONFIG)
    return folder


def as_published(folder: Path) -> Path:
    """Turn the folder into one of SqueezeLLM's own tool: a pickle with settings in it, and quant_config.json."""
    path = folder / "model.safetensors"
    tensors: dict[str, Any] = load_file(path)
    thresholds = {
        f"sparse_threshold.{name.removesuffix('.vals')}": len(tensors[name])
        for name in tensors
        if name.endswith(".vals")
    }
    torch.save(tensors | thresholds, folder / "sq-tiny-w4-s45.pt")
    path.unlink()
    set_config(folder, "quantization_config")
    (folder / "quant_config.json").write_text(json.dumps({"wbits": 4}, indent=4))
    return folder
