"""Compares adapters with PEFT's, in each family, and mixed batches with each sequence alone."""

import shutil
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import PreTrainedModel

from kernels.cpu import extension
from shared.errors import ModelError
from tests.models.family_variants import VARIANTS, gemma2
from tests.models.peft_adapters import adapted, make_adapter, set_adapter_config
from tests.models.tiny_models import Forward, llama, opt, reference_logits, save

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


# Sizes that the compiled layers take in one call, with more rows than one of their blocks has.
FUSED: dict[str, Any] = {
    "vocab_size": 512, "hidden_size": 128, "intermediate_size": 256, "num_attention_heads": 4,
    "num_key_value_heads": 2, "num_hidden_layers": 2, "initializer_range": 0.1,
}  # fmt: skip
FUSED_MODELS: dict[str, Callable[[], PreTrainedModel]] = {
    "llama": lambda: llama(**FUSED),
    "biases": lambda: llama(**FUSED, attention_bias=True, mlp_bias=True),
    "post norms": lambda: gemma2(**FUSED | {"head_dim": 32}),
    "layer norms": lambda: opt(
        vocab_size=512, hidden_size=128, word_embed_proj_dim=128, ffn_dim=256, num_attention_heads=4, init_std=0.1
    ),
}
ADAPTERS: list[dict[str, Any]] = [
    {"r": 16, "target_modules": "all-linear"},
    {"r": 3, "target_modules": ["q_proj", "v_proj"]},
    {"r": 8, "target_modules": "all-linear", "use_rslora": True},
]


@pytest.fixture(scope="module", params=FUSED_MODELS)
def model_with_adapters(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> tuple[PreTrainedModel, Path, list[Path]]:
    model, path = FUSED_MODELS[request.param](), tmp_path_factory.mktemp("model")
    folder = save(model, path / "model")
    return (
        model,
        folder,
        [make_adapter(model, path / str(seed), seed=seed, **config) for seed, config in enumerate(ADAPTERS)],
    )


def with_adapters(folder: Path, adapters: Sequence[Path], **config: Any) -> Forward:
    """Return the model with an adapter in each slot."""
    forward = Forward(folder, slots=6, blocks=6 * 12, max_loras=len(adapters), enable_lora=True, **config)
    for slot, adapter in enumerate(adapters):
        forward.adapters.load(slot + 10, str(adapter))
        forward.adapters.put(slot, slot + 10)
    return forward


def enter_all(forward: Forward, adapter_slots: Sequence[int]) -> None:
    for slot, adapter_slot in enumerate(adapter_slots):
        forward.enter(slot, TOKENS, range(slot * 12, slot * 12 + 12), adapter_slot)


@pytest.mark.skipif(not extension.load(), reason="only the compiled kernels are batch-invariant")
@pytest.mark.parametrize("quantization", ["none", "int8", "int4"])
def test_mixed_batches_have_the_bits_of_each_sequence_alone(
    model_with_adapters: tuple[PreTrainedModel, Path, list[Path]], quantization: str
) -> None:
    _, folder, adapters = model_with_adapters
    mixed = with_adapters(folder, adapters, quantization=quantization)
    enter_all(mixed, slots := [1, -1, 0, 2, 0, -1])
    whole = mixed.step(*((slot, 0, 41) for slot in range(6)))
    for slot, adapter_slot in enumerate(slots):
        alone = with_adapters(folder, adapters, quantization=quantization)
        alone.enter(0, TOKENS, range(12), adapter_slot)
        assert torch.equal(torch.cat([alone.step((0, 0, 30))[0], alone.step((0, 30, 11))[0]]), whole[slot])
    assert torch.equal(whole[2], whole[4])
    assert len({tuple(logits[-1].tolist()) for logits in whole}) == 4
    plain = Forward(folder, quantization=quantization)
    plain.enter(0, TOKENS, range(12))
    assert torch.equal(plain.step((0, 0, 41))[0], whole[1])
    mixed.storage.zero_()
    mixed.step(*((slot, 0, 40) for slot in (5, 1, 3, 0, 2, 4)))
    for slot, logits in zip(
        (4, 0, 2, 5, 3, 1), mixed.step(*((slot, 40, 1) for slot in (4, 0, 2, 5, 3, 1))), strict=True
    ):
        assert torch.equal(logits[0], whole[slot][-1])


def test_the_fused_layers_compute_as_peft(model_with_adapters: tuple[PreTrainedModel, Path, list[Path]]) -> None:
    model, folder, adapters = model_with_adapters
    forward = with_adapters(folder, adapters)
    enter_all(forward, [0, 1, 2])
    for logits, adapter in zip(forward.step((0, 0, 41), (1, 0, 41), (2, 0, 41)), adapters, strict=True):
        assert (logits - reference_logits(adapted(model, adapter), TOKENS)).abs().max() < 1e-4


@pytest.mark.skipif(not extension.load(), reason="the plain kernels have no fused layers")
def test_the_fused_layers_have_the_bits_of_single_operations(
    model_with_adapters: tuple[PreTrainedModel, Path, list[Path]], monkeypatch: pytest.MonkeyPatch
) -> None:
    _, folder, adapters = model_with_adapters
    for quantization in ("none", "int8"):
        fused, single = (with_adapters(folder, adapters, quantization=quantization) for _ in range(2))
        monkeypatch.setattr(single.decoder, "fused_layers", None)
        for forward in (fused, single):
            enter_all(forward, [2, 0, -1, 1])
        rows = [(slot, 0, 41) for slot in range(4)]
        for ours, theirs in zip(fused.step(*rows), single.step(*rows), strict=True):
            assert torch.equal(ours, theirs)


@pytest.mark.skipif(not extension.load(), reason="the plain kernels take no quants")
def test_quantised_weights_take_adapters(tmp_path: Path) -> None:
    """The adapter's part is computed from the activations in floats, so it is as exact as without quants."""
    model = llama(**FUSED)
    folder, adapter = save(model, tmp_path / "model"), make_adapter(model, tmp_path / "adapter", r=8)
    theirs = reference_logits(adapted(model, adapter), TOKENS)
    plain = reference_logits(model, TOKENS)
    for quantization, bound in (("int8", 0.1), ("int4", 0.5)):
        forward = with_adapters(folder, [adapter], quantization=quantization)
        enter_all(forward, [0, -1])
        ours, without = forward.step((0, 0, 41), (1, 0, 41))
        assert (ours - theirs).norm() / theirs.norm() < bound
        assert ((ours - without) - (theirs - plain)).norm() < 2 * (without - plain).norm() + 0.05 * (
            theirs - plain
        ).norm()


@pytest.mark.parametrize("pickled", [False, True], ids=["safetensors", "bin"])
def test_patterns_and_layers_of_a_config(tmp_path: Path, pickled: bool) -> None:
    model = llama()
    folder = save(model, tmp_path / "model")
    config: dict[str, Any] = {
        "r": 4,
        "target_modules": ["q_proj", "down_proj", "gate_proj"],
        "rank_pattern": {"q_proj": 7, r"layers\.1\.mlp\.down_proj": 2},
        "alpha_pattern": {"down_proj": 11},
        "layers_to_transform": [0, 1],
        "exclude_modules": ["layers.0.mlp.gate_proj"],
    }
    assert_as_peft(model, folder, make_adapter(model, tmp_path / "adapter", pickled=pickled, **config))


@pytest.mark.parametrize(
    "target_modules", [r".*\.layers\.[02]\.self_attn\.(q|o)_proj", "all-linear"], ids=["regex", "all-linear"]
)
def test_target_modules_as_text(tmp_path: Path, target_modules: str) -> None:
    model = llama()
    adapter = make_adapter(model, tmp_path / "adapter", target_modules=target_modules, use_rslora=True)
    set_adapter_config(adapter, target_modules=target_modules)  # PEFT saves a list
    assert_as_peft(model, save(model, tmp_path / "model"), adapter)


def test_equal_files_have_equal_digests(tmp_path: Path) -> None:
    model = llama()
    folder, adapter = save(model, tmp_path / "model"), make_adapter(model, tmp_path / "adapter")
    copied, changed = shutil.copytree(adapter, tmp_path / "copy"), shutil.copytree(adapter, tmp_path / "changed")
    set_adapter_config(changed, lora_alpha=8)
    adapters = Forward(folder, **LORA).adapters
    digests = [adapters.load(number, str(path)) for number, path in enumerate((adapter, copied, changed))]
    assert digests[0] == digests[1] != digests[2]


def test_an_adapter_that_was_unloaded_cannot_be_put(tmp_path: Path) -> None:
    model = llama()
    adapters = Forward(save(model, tmp_path / "model"), **LORA).adapters
    adapters.load(3, str(make_adapter(model, tmp_path / "adapter")))
    adapters.put(0, 3)
    adapters.unload(3)
    with pytest.raises(ModelError, match="adapter 3 was not loaded"):
        adapters.put(0, 3)
