"""Tests that hidden states of the last tokens of rows are those that a pass which returns all of them computes."""

import itertools
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import PreTrainedModel

from kernels.cpu import extension
from services.worker.models.decoder.decoder import Decoder
from tests.models.family_variants import gemma2, qwen2, qwen3, qwen3_moe
from tests.models.peft_adapters import make_adapter
from tests.models.tiny_models import Forward, llama, opt, save

SIZES = {"intermediate_size": 96, "hidden_size": 64, "num_attention_heads": 4, "head_dim": 16}
MODELS: dict[str, Callable[[], PreTrainedModel]] = {
    "llama": lambda: llama(**SIZES),
    "biases": lambda: qwen2(**SIZES),
    "norms of queries and keys": lambda: qwen3(**SIZES),
    "post norms, windows, softcaps": lambda: gemma2(**SIZES),
    "single operations": qwen3_moe,
    "norms behind": lambda: opt(do_layer_norm_before=False),
}
SETTINGS = [{}, {"quantization": "int8", "kv_cache_dtype": "int8"}, {"model_impl": "transformers"}]
TEXTS = torch.randint(3, 131, (5, 45), generator=torch.Generator().manual_seed(1)).tolist()
PROMPTS = [(slot, 0, 30 + slot) for slot in range(5)]  # more than one block of rows
LAST = {0: 1, 1: 0, 2: 7, 3: 1, 4: 34}


def entered(folder: Path, adapter_slots: list[int], **settings: Any) -> Forward:
    forward = Forward(folder, slots=5, blocks=64, block_size=4, **settings)
    for slot, adapter_slot in enumerate(adapter_slots):
        forward.enter(slot, TEXTS[slot], range(slot * 12, slot * 12 + 12), adapter_slot)
    return forward


def check(whole: Forward, part: Forward) -> None:
    """Compare prompts, of which some are read in part, and what is computed from their keys and values."""
    for all_logits, logits, count in zip(
        whole.step(*PROMPTS), part.step(*PROMPTS, last=LAST), LAST.values(), strict=True
    ):
        assert torch.equal(logits, all_logits[len(all_logits) - count :])
    mixed = [(3, 33, 1), (0, 30, 9), (4, 34, 1), (1, 31, 5)]
    read = part.step(*mixed, last={3: 1, 0: 0, 4: 1, 1: 1})
    for all_logits, logits in zip(whole.step(*mixed), read, strict=True):
        assert torch.equal(logits, all_logits[len(all_logits) - len(logits) :])
    for logits in part.step((2, 32, 3), (1, 36, 4), last={2: 0, 1: 0}):
        assert not len(logits)


@pytest.mark.parametrize("settings", SETTINGS, ids=str)
@pytest.mark.parametrize("name", MODELS)
def test_the_last_tokens_of_rows_have_the_bits_that_all_have(
    name: str, settings: dict[str, str], tmp_path: Path
) -> None:
    if "quantization" in settings and not extension.load():
        pytest.skip("the plain kernels take no quants")
    folder = save(MODELS[name](), tmp_path)
    whole, part = (entered(folder, [-1] * 5, **settings) for _ in range(2))
    check(whole, part)


@pytest.mark.parametrize("quantization", ["none", "int8"])
def test_the_last_tokens_of_rows_use_their_adapters(quantization: str, tmp_path: Path) -> None:
    if quantization != "none" and not extension.load():
        pytest.skip("the plain kernels take no quants")
    model = llama(**SIZES)
    folder = save(model, tmp_path / "model")
    adapters = [str(make_adapter(model, tmp_path / str(seed), seed=seed)) for seed in range(2)]
    settings: dict[str, Any] = {"quantization": quantization, "enable_lora": True, "max_loras": 2}
    whole, part = (entered(folder, [-1, 0, 1, 0, -1], **settings) for _ in range(2))
    for forward, (slot, adapter) in itertools.product((whole, part), enumerate(adapters)):
        forward.adapters.load(slot + 10, adapter)
        forward.adapters.put(slot, slot + 10)
    check(whole, part)


@pytest.mark.skipif(not extension.load(), reason="the plain kernels take any tokens")
@pytest.mark.parametrize(
    ("outputs", "error"), [([2], "must be the last tokens of rows"), ([3, 4], "is no token"), ([-1, 3], "is no token")]
)
def test_other_tokens_are_refused(
    outputs: list[int], error: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    forward = entered(save(llama(**SIZES), tmp_path), [-1])
    assert isinstance(forward.decoder, Decoder)
    fused = forward.decoder.fused_layers
    assert fused
    monkeypatch.setattr(forward.decoder, "fused_layers", lambda *inputs: fused(*inputs[:-1], torch.tensor(outputs)))
    with pytest.raises(RuntimeError, match=error):
        forward.step((0, 0, 4))
