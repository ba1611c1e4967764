"""Tests an int8 cache of keys and values with large biases, as in Qwen2 (KV8-01)."""

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import Tensor
from transformers import PreTrainedModel

from kernels.cpu import extension
from kernels.load import reference
from services.worker.config import WorkerConfig
from services.worker.models.decoder.decoder import Decoder
from services.worker.models.load import load_model
from tests.models.family_variants import gpt2, qwen2, qwen3
from tests.models.tiny_models import Forward, llama, opt, reference_logits, save

CPU = torch.device("cpu")
WIDE = {"hidden_size": 64, "num_attention_heads": 4, "num_key_value_heads": 2}
TOKENS = torch.randint(3, 131, (127,), generator=torch.Generator().manual_seed(0)).tolist()
compiled = pytest.mark.skipif(not extension.load(), reason="a cache of another type needs the compiled kernels")


def with_biases(model: PreTrainedModel, part: str, size: float) -> PreTrainedModel:
    """Set biases of about `size`, of both signs, for keys (`k_proj`) or values (`v_proj`), and return the model."""
    generator = torch.Generator().manual_seed(1)
    for name, bias in model.named_parameters():
        if name.endswith(f"{part}.bias"):
            signs = torch.randn(bias.shape, generator=generator).sign()
            bias.data = signs * size * (0.5 + torch.rand(bias.shape, generator=generator))
    return model


def logits(folder: Path, cache: str) -> Tensor:
    forward = Forward(folder, dtype="float32", kv_cache_dtype=cache)
    forward.enter(0, TOKENS, range(32))
    return forward.step((0, 0, len(TOKENS)))[0]


def num_agreeing(model: PreTrainedModel, folder: Path, cache: str) -> int:
    """Return at how many positions the likeliest token is that of transformers."""
    best = reference_logits(model, TOKENS).argmax(-1)
    return int((logits(save(model, folder), cache).argmax(-1) == best).sum())


@compiled
@pytest.mark.parametrize("size", [0, 50, 100, 300])
@pytest.mark.parametrize("name", ["qwen2", "llama", "opt"])
def test_the_likeliest_token_is_kept_whatever_the_keys_biases(name: str, size: float, tmp_path: Path) -> None:
    makers: dict[str, Callable[[], PreTrainedModel]] = {
        "qwen2": lambda: qwen2(**WIDE),
        "llama": lambda: llama(**WIDE, attention_bias=True),
        "opt": lambda: opt(hidden_size=64, word_embed_proj_dim=64, num_attention_heads=4),
    }
    model = with_biases(makers[name](), "k_proj", size)
    assert num_agreeing(model, tmp_path, "int8") >= 114
    if size and name != "opt":  # OPT rotates no keys, so bfloat16 loses little either
        assert num_agreeing(model, tmp_path, "int8") >= num_agreeing(model, tmp_path, "bfloat16")


@compiled
def test_large_biases_of_values_cost_nothing(tmp_path: Path) -> None:
    model = with_biases(qwen2(**WIDE), "v_proj", 100)
    theirs = reference_logits(model, TOKENS)
    errors = {cache: (logits(save(model, tmp_path), cache) - theirs).norm() for cache in ("int8", "bfloat16")}
    assert errors["int8"] < errors["bfloat16"]


@compiled
def test_only_an_int8_cache_lacks_biases(tmp_path: Path) -> None:
    """With other caches the bias stays in the matmul: adding it elsewhere would round it elsewhere."""
    folder = save(qwen2(), tmp_path)
    for cache, left_out in (("float32", False), ("bfloat16", False), ("int8", True)):
        decoder = Forward(folder, kv_cache_dtype=cache).decoder
        assert isinstance(decoder, Decoder)
        attention = decoder._layers[0].attention
        assert attention.qkv.bias is not None
        assert (attention.kv_bias.keys is not None) is left_out
        assert bool((attention.qkv.bias[-2 * 20 :] == 0).all()) is left_out


@compiled
def test_keys_that_are_normed_keep_their_bias(tmp_path: Path) -> None:
    model = qwen3(attention_bias=True)
    ours = logits(save(model, tmp_path), "int8")
    theirs = reference_logits(model, TOKENS)
    assert (ours - theirs).norm() < 0.1 * theirs.norm()


@pytest.mark.parametrize("make", [qwen2, gpt2], ids=["rotated", "not rotated"])
def test_the_reference_adds_the_same(make: Callable[[], PreTrainedModel], tmp_path: Path) -> None:
    model = with_biases(make(), "k_proj", 30)
    folder, kernels = save(model, tmp_path), reference()
    forward = Forward(folder, kv_cache_dtype="int8")
    forward.ops = kernels
    forward.decoder = load_model(folder, WorkerConfig(device="cpu", kv_cache_dtype="int8"), CPU, kernels).model
    shape = forward.decoder.shape
    forward.layout = kernels.kv_layout(shape.num_layers, shape.num_kv_heads, shape.head_dim, 4, torch.int8)
    forward.storage = forward.layout.allocate(64, CPU)
    forward.decoder.prepare_positions(129)
    forward.enter(0, TOKENS, range(32))
    ours = forward.step((0, 0, len(TOKENS)))[0]
    theirs = reference_logits(model, TOKENS)
    assert (ours - theirs).norm() < 0.1 * theirs.norm()
