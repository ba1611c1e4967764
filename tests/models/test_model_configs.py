"""Tests that each field of a config.json is honoured or refused by name, in older spellings too."""

import json
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import Gemma3Config, Gemma3ForConditionalGeneration, SiglipVisionConfig

from services.worker.checkpoint.config_json import ConfigJson
from services.worker.checkpoint.model_folder import ModelFolder
from services.worker.models.registry import choose_implementation, load_family
from services.worker.models.spec import DecoderSpec
from shared.errors import ModelError
from tests.models.family_variants import VARIANTS, longrope
from tests.models.tiny_models import (
    LLAMA,
    Forward,
    llama,
    quire_logits,
    randomize_constants,
    reference_logits,
    save,
    set_config,
    transformers_logits,
)

TOKENS = [5, 9, 100, 3, 77, 12, 44, 2, 90, 17, 23]


def config_of(name: str, folder: Path) -> dict[str, Any]:
    model = VARIANTS[name]()
    model.config.save_pretrained(folder)
    config: dict[str, Any] = json.loads((folder / "config.json").read_text())
    return config | {"architectures": [type(model).__name__]}


def spec(fields: dict[str, Any]) -> DecoderSpec:
    config = ConfigJson(fields)
    return load_family(choose_implementation(config).architecture).read_spec(config)


@pytest.mark.parametrize(
    ("name", "changes", "said"),
    [
        ("mistral", {"hidden_act": "gelu"}, "hidden_act 'gelu' is not supported.*silu"),
        ("mistral", {"sliding_window": 0}, "sliding_window must be at least 1, got 0"),
        ("mistral", {"sliding_window": "wide"}, "sliding_window"),
        ("qwen2", {"layer_types": ["full_attention", "chunked_attention", "full_attention"]}, "'chunked_attention'"),
        ("qwen2", {"layer_types": ["full_attention"]}, "layer_types has 1 entries for 3 layers"),
        ("qwen2", {"layer_types": ["sliding_attention"] * 3}, "there is no sliding_window"),
        ("qwen3", {"rope_parameters": {"rope_type": "dynamic", "factor": 2.0}}, "rope_type 'dynamic'"),
        ("gemma", {"use_bidirectional_attention": True}, "use_bidirectional_attention true"),
        ("gemma2", {"hidden_activation": "gelu"}, "hidden_activation 'gelu'"),
        ("gemma2", {"attn_logit_softcapping": "soft"}, "attn_logit_softcapping"),
        ("gemma3", {"attn_logit_softcapping": 50.0}, "attn_logit_softcapping"),
        ("gemma3", {"rope_parameters": {"sliding_attention": {"rope_type": "mystery"}}}, "rope_type 'mystery'"),
        ("phi3", {"rope_parameters": {"rope_type": "longrope"}}, "short_factor is missing"),
        ("gpt2", {"scale_attn_by_inverse_layer_idx": True}, "scale_attn_by_inverse_layer_idx true"),
        ("gpt2", {"add_cross_attention": True}, "add_cross_attention true"),
        ("gpt2", {"activation_function": "gelu"}, "activation_function 'gelu'.*gelu_new"),
        ("mixtral", {"num_experts_per_tok": 6}, "num_experts_per_tok is 6, of 5 experts"),
        ("qwen3_moe", {"mlp_only_layers": "none"}, "mlp_only_layers"),
        ("qwen3_moe", {"decoder_sparse_step": 0}, "decoder_sparse_step must be at least 1"),
        ("llama", {"num_key_value_heads": 4}, "num_attention_heads is 6, no multiple of num_key_value_heads, 4"),
    ],
)
def test_what_is_not_served_is_named(name: str, changes: dict[str, Any], said: str, tmp_path: Path) -> None:
    with pytest.raises(ModelError, match=said):
        spec(config_of(name, tmp_path) | changes)


JUNK = ["Infinity", "-Infinity", "NaN", "1e999", "9" * 400, r'"\ud800"', '[{"deep": [NaN]}]']


@pytest.mark.parametrize("value", JUNK, ids=[value[:9] for value in JUNK])
def test_numbers_beyond_json_in_fields_that_nobody_reads(value: str, tmp_path: Path) -> None:
    """LDG-22: Python's json, and so transformers, reads and writes such numbers."""
    folder = save(llama(), tmp_path)
    path = folder / "config.json"
    path.write_text(f'{path.read_text().rstrip().removesuffix("}")}, "unread": {value}}}')
    assert (quire_logits(folder, TOKENS) - transformers_logits(folder, TOKENS)).abs().max() < 1e-4


@pytest.mark.parametrize("value", ["Infinity", "-Infinity", "NaN", "1e999"])
@pytest.mark.parametrize(
    "name", ["hidden_size", "num_key_value_heads", "rms_norm_eps", "rope_theta", "tie_word_embeddings"]
)
def test_in_fields_that_are_read_they_are_refused(name: str, value: str, tmp_path: Path) -> None:
    """LDG-22."""
    save(llama(), tmp_path)
    set_config(tmp_path, "rope_parameters", **{name: float(value)})
    with pytest.raises(ModelError, match=f"config.json: {name}"):
        quire_logits(tmp_path, TOKENS)


@pytest.mark.parametrize("text", ["[" * 10**5, "{}//", "\ufeff{}", "9" * 5000, "[]", ""])
def test_what_is_no_json_object_is_refused(text: str, tmp_path: Path) -> None:
    """LDG-22: transformers refuses it too."""
    (tmp_path / "config.json").write_text(text)
    with pytest.raises(ModelError, match=re.escape(f"{tmp_path}/config.json: ")):
        ModelFolder.read(tmp_path)


def test_of_a_field_that_is_there_twice_the_last_counts(tmp_path: Path) -> None:
    """LDG-22."""
    (tmp_path / "config.json").write_text('{"vocab_size": 5, "vocab_size": 7}')
    assert ModelFolder.read(tmp_path).config == {"vocab_size": 7}


LAYERED = {"rope_type": "linear", "factor": 2.0}
BOTH: list[tuple[str, dict[str, Any]]] = [
    ("gemma3", {"rope_scaling": LAYERED}),
    ("gemma3", {"rope_scaling": LAYERED | {"rope_theta": 33.0}}),
    ("mixtral", {"rope_scaling": LAYERED}),
    ("qwen3", {"rope_scaling": {"rope_type": "yarn", "factor": 2.0, "original_max_position_embeddings": 64}}),
    ("phi3", {"rope_scaling": {"rope_type": "longrope", "short_factor": [1.0, 1.5, 2.0, 2.5, 3.0],
                               "long_factor": [4.0] * 5}, "original_max_position_embeddings": 128,
              "max_position_embeddings": 256}),
    ("phi3", {"rope_scaling": {"rope_type": "yarn", "short_factor": [1.0, 1.5, 2.0, 2.5, 3.0],
                               "long_factor": [4.0] * 5}, "original_max_position_embeddings": 128,
              "max_position_embeddings": 256}),
]  # fmt: skip


@pytest.mark.parametrize(("name", "changes"), BOTH)
def test_an_older_rope_beside_a_newer_one(name: str, changes: dict[str, Any], tmp_path: Path) -> None:
    """LDG-22: each family takes the one that transformers takes; all take `rope_parameters`."""
    save(VARIANTS[name](), tmp_path)
    set_config(tmp_path, **changes)
    assert "rope_parameters" in (tmp_path / "config.json").read_text()
    assert (quire_logits(tmp_path, TOKENS) - transformers_logits(tmp_path, TOKENS)).abs().max() < 1e-4


@pytest.mark.parametrize(
    ("name", "fields"),
    [
        ("mistral", {"attention_bias": True, "mlp_bias": True}),
        ("mixtral", {"attention_bias": True}),
        ("phi3", {"attention_bias": True}),
        ("qwen2", {"attention_bias": True, "mlp_bias": True}),
        ("qwen3", {"mlp_bias": True}),
        ("gemma2", {"mlp_bias": True}),
    ],
)
def test_fields_of_other_families_are_passed_over(name: str, fields: dict[str, Any], tmp_path: Path) -> None:
    """LDG-24: transformers ignores them too, since its models of these families have no such biases."""
    save(VARIANTS[name](), tmp_path)
    set_config(tmp_path, **fields)
    assert (quire_logits(tmp_path, TOKENS) - transformers_logits(tmp_path, TOKENS)).abs().max() < 1e-4


@pytest.mark.parametrize(
    ("name", "older"),
    [
        ("gemma", {"hidden_act": "gelu"}),
        ("gemma", {"hidden_act": None, "hidden_activation": "gelu_pytorch_tanh"}),
        ("gemma3", {"layer_types": None, "sliding_window_pattern": 2, "rope_parameters": None}),
        ("qwen3_moe", {"num_local_experts": None, "num_experts": 6}),
        ("mixtral", {"rope_parameters": None, "rope_theta": 1e6}),
        ("phi3, part of each head", {"rope_parameters": None, "rope_theta": 1e4, "partial_rotary_factor": 0.6}),
    ],
)
def test_older_spellings_mean_the_same(name: str, older: dict[str, Any], tmp_path: Path) -> None:
    config = config_of(name, tmp_path)
    assert spec(config | older) == spec(config)


def test_a_mistral_of_two_kinds_of_layers(tmp_path: Path) -> None:
    """LDG-22: transformers treats one with `layer_types` as a Ministral."""
    save(VARIANTS["mistral"](), tmp_path)
    set_config(tmp_path, layer_types=["full_attention", "sliding_attention", "full_attention"])
    assert (quire_logits(tmp_path, TOKENS) - transformers_logits(tmp_path, TOKENS)).abs().max() < 1e-4


@pytest.mark.parametrize("name", ["mistral", "qwen2, window above", "gemma2", "gemma3", "qwen3_moe, some dense"])
def test_windows(name: str, tmp_path: Path) -> None:
    windows = {
        "mistral": (7, 7, 7),
        "qwen2, window above": (0, 0, 7),
        "gemma2": (7, 0, 7),
        "gemma3": (7, 0, 7),
        "qwen3_moe, some dense": (7, 7, 7),
    }
    assert tuple(layer.window for layer in spec(config_of(name, tmp_path)).layers) == windows[name]


def test_long_contexts_have_the_long_factors(tmp_path: Path) -> None:
    """These models serve contexts of up to 128 tokens, and their original length is 10."""
    model = longrope(10)
    forward = Forward(save(model, tmp_path))
    forward.enter(0, TOKENS, [2, 0, 1])
    (ours,) = forward.step((0, 0, len(TOKENS)))
    assert (ours - reference_logits(model, TOKENS)).abs().max() < 1e-4
    (short,) = forward.step((0, 0, 9))
    assert torch.equal(short, ours[:9])
    assert (
        short - reference_logits(model, TOKENS[:9])
    ).abs().max() > 0.1  # transformers decides by the length of the sequence


def test_absent_fields_have_the_familys_defaults(tmp_path: Path) -> None:
    """Configs of models that take images leave out the fields that they share with the family."""
    text = {"hidden_size": 2560, "intermediate_size": 10240, "model_type": "gemma3_text", "num_hidden_layers": 34,
            "rope_scaling": {"factor": 8.0, "rope_type": "linear"}, "sliding_window": 1024}  # fmt: skip
    read = spec({"architectures": ["Gemma3ForConditionalGeneration"], "text_config": text})
    assert (read.vocab_size, read.num_heads, read.num_kv_heads, read.head_dim) == (262208, 8, 4, 256)
    assert (read.max_positions, read.tied, read.scale) == (131072, True, 1 / 16)
    assert [layer.window for layer in read.layers[:7]] == [1024] * 5 + [0, 1024]
    local, everywhere = read.layers[0].rope, read.layers[5].rope
    assert local is not None
    assert everywhere is not None
    assert everywhere.inverse_frequencies[0] == 1 / 8
    assert local.inverse_frequencies[:2] == pytest.approx((1.0, 10_000.0 ** (-1 / 128)))


def test_the_text_model_among_images(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    shape = {"head_dim": 14, "query_pre_attn_scalar": 9, "sliding_window": 4, "sliding_window_pattern": 2}
    vision = SiglipVisionConfig(
        hidden_size=8, intermediate_size=8, num_hidden_layers=1, num_attention_heads=1, image_size=28, patch_size=14
    )
    config = Gemma3Config(text_config=LLAMA | shape, vision_config=vision.to_dict(), mm_tokens_per_image=4)
    config._attn_implementation = "eager"
    model = randomize_constants(Gemma3ForConditionalGeneration(config))
    forward = Forward(save(model, tmp_path))
    forward.enter(0, TOKENS, [2, 0, 1])
    (ours,) = forward.step((0, 0, len(TOKENS)))
    assert (ours - reference_logits(model, TOKENS)).abs().max() < 1e-4
    assert not caplog.records
