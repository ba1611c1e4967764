"""Tests of quantised checkpoints share these: a size of models that every format takes, tokens, and their logits."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import PreTrainedModel

from kernels.cpu import extension
from services.worker.checkpoint.model_folder import ModelFolder
from services.worker.checkpoint.weight_files import WeightFiles
from tests.models.gptq_awq_writer import Scheme, save_packed
from tests.models.squeezellm_writer import TableScheme, save_tables
from tests.models.tiny_models import Forward, rewrite_weights

CPU = torch.device("cpu")
compiled = pytest.mark.skipif(not extension.load(), reason="the kernels are not compiled here")

WIDE = {"hidden_size": 64, "intermediate_size": 128, "num_attention_heads": 4, "num_key_value_heads": 2}
TOKENS = torch.randint(3, 131, (41,), generator=torch.Generator().manual_seed(1)).tolist()
Q = "model.layers.0.self_attn.q_proj"


def save_quantized(
    model: PreTrainedModel,
    folder: Path,
    scheme: Scheme | TableScheme,
    *,
    plain: Callable[[str], bool] = lambda name: name == "lm_head",
) -> Path:
    """Save `model` quantised, except for the modules that are `plain`, and give it the dequantised weights."""
    if isinstance(scheme, TableScheme):
        return save_tables(model, folder, scheme, plain=plain)
    return save_packed(model, folder, scheme, plain=plain)


def logits(folder: Path, **config: Any) -> tuple[Tensor, Forward]:
    """Return the logits of `TOKENS`, and the decoder that has computed them."""
    forward = Forward(folder, **config)
    forward.enter(0, TOKENS, range(11))
    return forward.step((0, 0, len(TOKENS)))[0], forward


def assert_rounded(ours: Tensor, theirs: Tensor) -> None:
    """Activations are rounded, and with weights as large as here each rounding grows. A wrong weight would give 1."""
    assert 1e-4 < (ours - theirs).norm() / theirs.norm() < 0.2


def weight_files(folder: Path) -> WeightFiles:
    return WeightFiles(ModelFolder.read(folder))


def replace_tensor(folder: Path, name: str, tensor: Tensor | None) -> None:
    """Put `tensor` into the checkpoint under `name`, or remove what is there."""
    rewrite_weights(
        folder,
        lambda tensors: {
            **{other: stored for other, stored in tensors.items() if other != name},
            **({} if tensor is None else {name: tensor}),
        },
    )
