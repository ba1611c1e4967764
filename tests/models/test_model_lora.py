"""Compares adapters with PEFT's, in each family, and mixed batches with each sequence alone."""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import PreTrainedModel

from tests.models.family_variants import VARIANTS
from tests.models.peft_adapters import adapted, make_adapter
from tests.models.tiny_models import Forward, reference_logits, save

TOKENS = torch.randint(3, 131, (41,), generator=torch.Generator().manual_seed(1)).tolist()
BLOCKS = [17, 3, 40, 8, 63, 0, 22, 5, 31, 12, 50]
LORA = {"enable_lora": True, "max_loras": 3}


def logits_with(folder: Path, adapter: Path, tokens: list[int] = TOKENS, **config: Any) -> Tensor:
    """Return logits (T, V) of Quire with an adapter."""
    forward = Forward(folder, **LORA | config)
    forward.adapters.load(7, str(adapter))
    forward.adapters.put(2, 7)
    forward.enter(0, tokens, BLOCKS, adapter_slot=2)
    return forward.step((0, 0, len(tokens)))[0]


def assert_as_peft(model: PreTrainedModel, folder: Path, adapter: Path) -> None:
    ours, plain = logits_with(folder, adapter), reference_logits(model, TOKENS)
    for merged in (False, True):
        theirs = reference_logits(adapted(model, adapter, merged=merged), TOKENS)
        assert (theirs - plain).abs().max() > 0.1  # or the comparison would mean nothing
        assert (ours - theirs).abs().max() < 1e-4


@pytest.mark.parametrize("name", VARIANTS)
def test_logits_equal_those_of_peft(name: str, tmp_path: Path) -> None:
    model = VARIANTS[name]()
    folder = save(model, tmp_path / "model")
    targets: Any = "all-linear"
    if "mixtral" in name or "qwen3_moe" in name:
        targets = ["q_proj", "k_proj", "v_proj", "o_proj"]
    elif "350m" in name or "projected" in name:
        targets = ["q_proj", "k_proj", "v_proj", "out_proj", "fc1", "fc2"]
    assert_as_peft(model, folder, make_adapter(model, tmp_path / "adapter", target_modules=targets))
