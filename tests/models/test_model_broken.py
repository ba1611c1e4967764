"""Tests that a folder that is broken, or asks for what Quire does not compute, is refused in one line with the reason.

None of them may be served, raise anything but a ModelError, or take memory for sizes that the weights don't have.
"""

import json
import os
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from tokenizers import Tokenizer
from tokenizers.models import BPE
from torch import Tensor
from transformers import PreTrainedModel

from kernels.load import ops
from quire.startup_checks import check_model
from services.gateway.config import GatewayConfig
from services.gateway.served_model import TextParts
from services.worker.checkpoint.errors import name_folder_in_errors
from services.worker.config import WorkerConfig
from services.worker.models.load import LoadedModel, load_model
from shared.errors import ModelError
from tests.models.fallback_models import granite
from tests.models.family_variants import VARIANTS
from tests.models.tiny_models import change_weights, llama, opt, save

CPU = torch.device("cpu")
MAKERS: dict[str, Callable[[], PreTrainedModel]] = {**VARIANTS, "llama": llama, "opt": opt, "granite": granite}
HUGE = 2**31


def load(folder: Path, **config: Any) -> LoadedModel:
    return load_model(folder, WorkerConfig(device="cpu", **config), CPU, ops(CPU))


def refused(folder: Path, said: str, **config: Any) -> None:
    with pytest.raises(ModelError, match=said) as caught:
        load(folder, **config)
    text = str(caught.value)
    assert str(folder) in text
    assert "\n" not in text


def save_changed(name: str, folder: Path, **changes: Any) -> Path:
    """Save a tiny model with a changed config.json."""
    save(MAKERS[name](), folder)
    path = folder / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))
    return folder


# quantised weights

QUANTS = [torch.float8_e4m3fn, torch.float8_e5m2, torch.int8, torch.uint8, torch.int32, torch.int64]
PROJECTION = "model.layers.1.mlp.up_proj.weight"


@pytest.mark.parametrize("dtype", QUANTS, ids=str)
@pytest.mark.parametrize("name", ["llama", "granite"])
def test_weights_that_need_scales_are_refused(name: str, dtype: torch.dtype, tmp_path: Path) -> None:
    def quantize(tensors: dict[str, Tensor]) -> None:
        tensors[PROJECTION] = tensors[PROJECTION].to(dtype)
        tensors[f"{PROJECTION}_scale"] = torch.tensor(0.5)

    save_changed(name, tmp_path)
    change_weights(tmp_path, quantize)
    refused(tmp_path, re.escape(f"tensor {PROJECTION} is of {dtype}: quantised weights are not supported"))


def test_integers_that_are_no_weights_are_passed_over(tmp_path: Path) -> None:
    save_changed("granite", tmp_path)
    mask = torch.ones(1, 1, 4, 4)
    change_weights(
        tmp_path, lambda t: t.update({"model.layers.0.self_attn.bias": mask.to(torch.uint8), "m": mask.bool()})
    )
    assert load(tmp_path).model.shape.architecture == "GraniteForCausalLM"


@pytest.mark.parametrize("file", ["hf_quant_config.json", "quantize_config.json", "quant_config.json"])
@pytest.mark.parametrize("name", ["llama", "granite"])
def test_markers_of_quantisation_beside_the_config(name: str, file: str, tmp_path: Path) -> None:
    save_changed(name, tmp_path)
    (tmp_path / file).write_text("{}")
    refused(tmp_path, f"there is a {file}, but no quantization_config in config.json, which is not supported")


@pytest.mark.parametrize(
    "changes",
    [
        {"quantization_config": {"quant_method": "fp8"}},
        {"compression_config": {"format": "float-quantized"}},
        {"text_config": {"quantization_config": {"quant_method": "fp8"}}},
    ],
)
def test_markers_of_quantisation_in_the_config(changes: dict[str, Any], tmp_path: Path) -> None:
    refused(save_changed("llama", tmp_path, **changes), "config.*is not supported .of quantised checkpoints these are")


# weights that give NaN


@pytest.mark.parametrize("value", [float("nan"), float("inf"), -float("inf")])
@pytest.mark.parametrize("tensor", ["model.embed_tokens.weight", PROJECTION, "model.norm.weight"])
@pytest.mark.parametrize("name", ["llama", "granite"])
def test_logits_must_be_finite(name: str, tensor: str, value: float, tmp_path: Path) -> None:
    save_changed(name, tmp_path)
    change_weights(tmp_path, lambda tensors: tensors[tensor].fill_(value))
    refused(tmp_path, "the model's logits are not finite")


def test_a_type_too_narrow_for_the_weights(tmp_path: Path) -> None:
    save_changed("llama", tmp_path)
    change_weights(tmp_path, lambda tensors: tensors["model.norm.weight"].fill_(1e5))
    assert load(tmp_path).precision.dtype == torch.float32
    refused(tmp_path, "logits are not finite: .*too large for float16", dtype="float16")


def test_models_of_few_positions_are_tried_too(tmp_path: Path) -> None:
    for name, field, tensor in (
        ("gpt2", "n_positions", "transformer.wpe.weight"),
        ("opt", "max_position_embeddings", "model.decoder.embed_positions.weight"),
    ):
        rows = 5 if name == "opt" else 3  # two rows of the table come before position 0
        folder = save_changed(name, tmp_path / name, **{field: 3})
        change_weights(folder, lambda t, tensor=tensor, rows=rows: t.update({tensor: t[tensor][:rows]}))
        assert load(folder).model.shape.max_positions == 3


# config.json

SIZES = [
    (name, changes, said)
    for name in ("llama", "mistral", "qwen2", "qwen3", "gemma", "gemma2", "gemma3", "qwen3_moe", "phi3", "mixtral")
    for changes, said in [
        ({"num_attention_heads": 0}, "num_attention_heads must be at least 1, got 0"),
        ({"head_dim": -4}, "head_dim must be at least 1, got -4"),
        ({"head_dim": HUGE}, f"head_dim must be at most 65536, got {HUGE}"),
        ({"rms_norm_eps": -1e-6}, "rms_norm_eps must be a number that is not negative, got -1e-06"),
        ({"vocab_size": HUGE - 1}, r"embed_tokens.weight has shape \[131, 60\]"),
    ]
]


@pytest.mark.parametrize(
    ("name", "changes", "said"),
    [
        *SIZES,
        ("llama", {"hidden_size": HUGE}, f"hidden_size must be at most {HUGE - 1}, got {HUGE}"),
        ("llama", {"hidden_size": 2**70}, "hidden_size"),
        ("llama", {"hidden_size": "\ud800"}, "hidden_size: 'utf-8' codec can't encode character"),
        ("llama", {"hidden_size": 2**18}, r"embed_tokens.weight has shape \[131, 60\]"),
        ("llama", {"intermediate_size": HUGE - 1}, rf"_proj.weight has shape .*says \[{HUGE - 1}, 60\]"),
        ("llama", {"num_attention_heads": HUGE - 2, "head_dim": 10}, "q_proj.weight has shape"),
        ("llama", {"num_hidden_layers": 10**9}, "num_hidden_layers must be at most 65536"),
        ("llama", {"num_hidden_layers": 60000}, r"layers\.3\.\S+ is missing \(and many more\)"),
        ("llama", {"max_position_embeddings": 0}, "max_position_embeddings must be at least 1, got 0"),
        ("llama", {"architectures": 1.5}, "architectures"),
        ("llama", {"architectures": [None]}, "architectures"),
        ("gpt2", {"n_head": 0}, "n_head must be at least 1, got 0"),
        ("gpt2", {"n_embd": HUGE}, "n_embd must be at most"),
        ("gpt2", {"n_inner": 0}, "n_inner must be at least 1"),
        ("gpt2", {"layer_norm_epsilon": -1.0}, "layer_norm_epsilon"),
        ("opt", {"num_attention_heads": 0}, "num_attention_heads must be at least 1, got 0"),
        ("opt", {"ffn_dim": HUGE}, "ffn_dim must be at most"),
        ("opt", {"word_embed_proj_dim": -1}, "word_embed_proj_dim must be at least 1, got -1"),
        ("mixtral", {"num_local_experts": 10**6}, "num_local_experts must be at most 65536, got 1000000"),
        ("mixtral", {"num_local_experts": 60000}, r"experts\.5\.w1\.weight is missing \(and many more\)"),
        ("mixtral", {"num_experts_per_tok": 0}, "num_experts_per_tok must be at least 1"),
        ("qwen3_moe", {"moe_intermediate_size": -1}, "moe_intermediate_size must be at least 1, got -1"),
        ("gemma2", {"query_pre_attn_scalar": 0}, "query_pre_attn_scalar must be a positive number, got 0.0"),
        ("gemma2", {"final_logit_softcapping": -3.0}, "final_logit_softcapping must be"),
        ("gemma3", {"query_pre_attn_scalar": -9}, "query_pre_attn_scalar must be a positive number, got -9.0"),
        ("gemma3", {"sliding_window_pattern": 0}, "sliding_window_pattern must be at least 1, got 0"),
        ("gemma3", {"sliding_window": HUGE}, "sliding_window must be at most"),
        ("granite", {"num_attention_heads": 0}, "num_attention_heads must be at least 1, got 0"),
        ("granite", {"hidden_size": HUGE}, f"hidden_size must be at most {HUGE - 1}, got {HUGE}"),
        ("granite", {"vocab_size": HUGE - 1}, r"embed_tokens.weight has shape \[263, 48\]"),
        ("granite", {"vocab_size": 11}, r"weight has shape \[263, 48\], and config.json says \[11, 48\]"),
        ("granite", {"num_hidden_layers": 10**9}, "num_hidden_layers must be at most 65536"),
        ("granite", {"num_hidden_layers": 4}, r"layers\.3\.\S+ is missing \(and 8 more\)"),
        ("granite", {"rms_norm_eps": -1.0}, "rms_norm_eps must be a number that is not negative, got -1.0"),
        ("granite", {"rope_parameters": {"rope_type": "default", "rope_theta": -1.0}}, "rope_theta must be a positive"),
        ("granite", {"head_dim": 7}, "StrictDataclass.*: ValueError: .*head_dim"),
    ],
)  # fmt: skip
def test_wrong_sizes_are_named(name: str, changes: dict[str, Any], said: str, tmp_path: Path) -> None:
    refused(save_changed(name, tmp_path, **changes), said)


LONG = {"rope_type": "longrope", "original_max_position_embeddings": 16, "long_factor": [1.0] * 5}


@pytest.mark.parametrize(
    ("name", "rope", "said"),
    [
        ("llama", {"rope_theta": 0}, "rope_theta must be a positive number, got 0.0"),
        ("llama", {"rope_theta": -1e4}, "rope_theta must be a positive number"),
        ("llama", {"rope_type": "linear", "factor": 0.0}, "factor must be a positive number"),
        ("llama", {"rope_type": "linear", "factor": 1e300}, "max_position_embeddings times the rope's factor"),
        ("llama", {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 0},
         "original_max_position_embeddings must be at least 1, got 0"),
        ("llama", {"rope_type": "yarn", "factor": 4.0, "beta_fast": -1.0}, "rope_scaling"),
        ("llama", {"rope_type": "yarn", "factor": 4.0, "beta_fast": "fast"}, "rope_scaling"),
        ("llama", {"rope_type": "llama3", "factor": 4.0, "low_freq_factor": 0.0, "high_freq_factor": 0.0,
                   "original_max_position_embeddings": 16}, "rope_scaling"),
        ("llama", {"rope_type": "yarn", "factor": 4.0, "attention_factor": "x"}, "attention_factor: Expected `float`"),
        ("llama", {"rope_type": 5}, "rope_type must be a string, got 5"),
        ("llama", {"rope_type": "factors", "factors": [1.0, 2.0, 0.0, 1.0, 1.0]}, "factors must hold positive numbers"),
        ("phi3", {**LONG, "short_factor": [-1.0] * 5}, "short_factor must hold positive numbers"),
        ("phi3", {**LONG, "short_factor": [1.0] * 5, "original_max_position_embeddings": -1}, "original_max_position"),
        ("phi3", {**LONG, "short_factor": [1.0] * 5, "attention_factor": -1.0}, "attention_factor must be a positive"),
        ("phi3", {"partial_rotary_factor": 1.5}, "partial_rotary_factor 1.5 of head_dim 10 are 15 rotated dimensions"),
        ("phi3", {"partial_rotary_factor": 1e308}, r"partial_rotary_factor 1e\+308 of head_dim 10"),
        ("phi3", {"partial_rotary_factor": 0.5}, "partial_rotary_factor 0.5 of head_dim 10 are 5 rotated dimensions"),
        ("phi3", {"partial_rotary_factor": 0.1}, "partial_rotary_factor 0.1 of head_dim 10 are 1 rotated dimensions"),
        ("phi3", {"partial_rotary_factor": 0.0}, "partial_rotary_factor must be a positive number"),
    ],
)  # fmt: skip
def test_wrong_ropes_are_named(name: str, rope: dict[str, Any], said: str, tmp_path: Path) -> None:
    refused(save_changed(name, tmp_path, rope_parameters={"rope_theta": 1e4, **rope}), said)


@pytest.mark.parametrize("name", ["llama", "mistral", "mixtral", "gemma", "gemma3", "qwen2", "qwen3", "qwen3_moe"])
def test_partial_rotation_is_not_guessed(name: str, tmp_path: Path) -> None:
    """transformers' code for these passes over the field; other engines honour it."""
    folder = save_changed(name, tmp_path, partial_rotary_factor=0.4)
    refused(folder, "partial_rotary_factor 0.4 is not supported")


# unforeseen errors


@pytest.mark.parametrize(
    ("error", "said"),
    [
        (ZeroDivisionError("division by zero"), "cannot be loaded: ZeroDivisionError: division by zero"),
        (OverflowError("too large\nmore"), "cannot be loaded: OverflowError: too large$"),
        (KeyError("size"), "KeyError: 'size'"),
        (RecursionError("too deep"), "RecursionError"),
        (RuntimeError("shape '[1]' is invalid"), "RuntimeError: shape"),
        (TypeError("no"), "TypeError"),
        (ValueError("no"), "ValueError"),
        (MemoryError(), "MemoryError"),
        (OSError(12, "Cannot allocate memory"), "Cannot allocate memory"),
        (torch.OutOfMemoryError("CUDA out of memory. Tried\nmore"), "does not fit into the GPU's memory"),
        (ModelError("config.json: x is missing"), "config.json: x is missing$"),
    ],
    ids=lambda value: type(value).__name__ if isinstance(value, Exception) else None,
)
def test_every_error_names_the_folder(error: Exception, said: str, tmp_path: Path) -> None:
    with pytest.raises(ModelError, match=said) as caught, name_folder_in_errors(tmp_path):
        raise error
    assert str(caught.value).startswith(f"{tmp_path}: ")
    assert "\n" not in str(caught.value)
    assert caught.value.__cause__ is error


def test_a_folder_is_named_once(tmp_path: Path) -> None:
    error = ModelError(f"{tmp_path}/config.json does not exist")
    with pytest.raises(ModelError) as caught, name_folder_in_errors(tmp_path):
        raise error
    assert caught.value is error


def test_a_pickle_of_something_else(tmp_path: Path) -> None:
    save_changed("llama", tmp_path)
    (tmp_path / "model.safetensors").unlink()
    torch.save([torch.ones(1)], tmp_path / "pytorch_model.bin")
    refused(tmp_path, r"pytorch_model\.bin holds list, not tensors by name")
    torch.save({"state_dict": {"a": torch.ones(1)}, "step": 5}, tmp_path / "pytorch_model.bin")
    refused(tmp_path, "the weight files hold no tensors")


def test_a_pickle_of_parameters(tmp_path: Path) -> None:
    save_changed("llama", tmp_path)
    tensors = load_file(tmp_path / "model.safetensors")
    expected = load(tmp_path).fingerprint
    (tmp_path / "model.safetensors").unlink()
    parameters = {name: torch.nn.Parameter(tensor) for name, tensor in tensors.items()}
    torch.save({**parameters, 5: torch.ones(1)}, tmp_path / "pytorch_model.bin")
    loaded = load(tmp_path)
    assert loaded.fingerprint != expected, "other files"
    assert loaded.model.shape.architecture == "LlamaForCausalLM"


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (lambda tensor: tensor.to("meta"), "on no device"),
        (lambda tensor: tensor.to_sparse(), "sparse_coo"),
        (lambda tensor: torch.nested.nested_tensor([tensor]), "nested"),
    ],
)
@pytest.mark.filterwarnings("ignore")  # torch calls some of these a prototype
def test_a_pickle_of_tensors_that_hold_no_plain_numbers(
    change: Callable[[Tensor], Tensor], said: str, tmp_path: Path
) -> None:
    save_changed("llama", tmp_path)
    tensors = load_file(tmp_path / "model.safetensors")
    (tmp_path / "model.safetensors").unlink()
    torch.save(tensors | {PROJECTION: change(tensors[PROJECTION])}, tmp_path / "pytorch_model.bin")
    refused(tmp_path, rf"pytorch_model\.bin: tensor {PROJECTION} is {said}, not plain numbers")


@pytest.mark.parametrize(
    ("content", "said"),
    [
        ({"weight_map": {}}, "it lists no files"),
        ({"weight_map": {"a": "x" * 5000}}, "File name too long"),
        ({"weight_map": {"a": "."}}, "is missing; model.safetensors.index.json lists it"),
        ({"weight_map": None}, "Expected `object`, got `null`"),
    ],
)
def test_an_index_of_no_files(content: dict[str, Any], said: str, tmp_path: Path) -> None:
    save_changed("llama", tmp_path)
    (tmp_path / "model.safetensors").unlink()
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps(content))
    refused(tmp_path, said)
    with pytest.raises(ModelError, match=said):
        check_model(with_tokenizer(tmp_path))


# the command line's checks


def with_tokenizer(folder: Path) -> Path:
    Tokenizer(BPE()).save(str(folder / "tokenizer.json"))
    return folder


@pytest.mark.parametrize("name", ["config.json", "model.safetensors", "tokenizer.json", "quantize_config.json"])
def test_a_pipe_is_not_waited_for(name: str, tmp_path: Path) -> None:
    with_tokenizer(save_changed("llama", tmp_path))
    (tmp_path / name).unlink(missing_ok=True)
    os.mkfifo(tmp_path / name)
    with pytest.raises(ModelError, match=rf"^{tmp_path}[^\n]*$"):
        _read_all(tmp_path)


def test_a_pipe_beside_the_weights_is_not_waited_for(tmp_path: Path) -> None:
    with_tokenizer(save_changed("llama", tmp_path))
    os.mkfifo(tmp_path / "model.safetensors.index.json")
    _read_all(tmp_path)


def _read_all(folder: Path) -> None:
    check_model(folder)
    TextParts.load(GatewayConfig(), folder)
    load(folder)


@pytest.mark.parametrize(
    "error", [TypeError("no"), RecursionError("too deep"), OSError(36, "File name too long"), MemoryError()]
)
@pytest.mark.parametrize("place", ["read_supported", "find_weights", "check_tokenizer_files"])
def test_an_unforeseen_error_of_a_check_names_the_folder(
    place: str, error: Exception, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with_tokenizer(save_changed("llama", tmp_path))

    def fail(*_: object) -> None:
        raise error

    monkeypatch.setattr(f"quire.startup_checks.{place}", fail)
    with pytest.raises(ModelError, match=rf"^{tmp_path} cannot be read \({type(error).__name__}: [^\n]*\)$"):
        check_model(tmp_path)


def test_an_unforeseen_error_of_reading_the_tokenizer_names_the_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with_tokenizer(save_changed("llama", tmp_path))
    monkeypatch.setattr("shared.text.tokenizer.special_tokens", lambda folder: {}["x"])
    with pytest.raises(ModelError, match=rf"^{tmp_path} cannot be read \(KeyError: 'x'\)$"):
        TextParts.load(GatewayConfig(), tmp_path)
