"""Tests that a decoder's layers in one call give the bits of single operations, for each type of layer."""

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from transformers import PreTrainedModel

from kernels.cpu import extension
from services.worker.models.decoder.decoder import Decoder
from tests.models.family_variants import gemma, gemma2, gemma3, phi3, qwen2, qwen3, qwen3_moe
from tests.models.tiny_models import Forward, llama, save

pytestmark = pytest.mark.skipif(not extension.load(), reason="the kernels are not compiled here")
SIZES = {"intermediate_size": 96, "hidden_size": 64, "num_attention_heads": 4, "head_dim": 16}
JOINED: dict[str, Callable[[], PreTrainedModel]] = {
    "llama": lambda: llama(**SIZES),
    "biases": lambda: llama(**SIZES, attention_bias=True, mlp_bias=True),
    "qwen2": lambda: qwen2(**SIZES),
    "norms of queries and keys": lambda: qwen3(**SIZES),
    "gelu": lambda: gemma(**SIZES),
    "post norms, windows, softcaps": lambda: gemma2(**SIZES),
    "two ropes": lambda: gemma3(**SIZES),
    "part of a head rotated": lambda: phi3(**SIZES, partial_rotary_factor=0.5),
}
TEXTS = torch.randint(3, 131, (5, 45), generator=torch.Generator().manual_seed(1)).tolist()


PRECISIONS = [
    {},
    {"dtype": "bfloat16"},
    {"quantization": "int8"},
    {"quantization": "int4"},
    {"kv_cache_dtype": "int8"},
]


@pytest.mark.parametrize("precision", PRECISIONS, ids=str)
@pytest.mark.parametrize("name", JOINED)
def test_the_bits_are_those_of_the_single_operations(name: str, precision: dict[str, str], tmp_path: Path) -> None:
    folder = save(JOINED[name](), tmp_path)
    joined, single = (Forward(folder, slots=5, blocks=64, block_size=4, **precision) for _ in range(2))
    assert isinstance(joined.decoder, Decoder)
    assert isinstance(single.decoder, Decoder)
    assert joined.decoder.fused_layers
    single.decoder.fused_layers = None
    results = []
    for forward in (joined, single):
        for slot, text in enumerate(TEXTS):
            forward.enter(slot, text, range(slot * 12, slot * 12 + 12))
        first = forward.step(*((slot, 0, 30 + slot) for slot in range(5)))  # more than one block of rows
        results.append([*first, *forward.step(*((slot, 30 + slot, 11 - slot * 2) for slot in (3, 0, 4, 1)))])
    assert all(torch.equal(a, b) for a, b in zip(*results, strict=True))


@pytest.mark.parametrize("model", [lambda: llama(intermediate_size=77), lambda: qwen3_moe()])
def test_other_kinds_are_left_to_single_operations(model: Callable[[], PreTrainedModel], tmp_path: Path) -> None:
    decoder = Forward(save(model(), tmp_path)).decoder
    assert isinstance(decoder, Decoder)
    assert decoder.fused_layers is None
