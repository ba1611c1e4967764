"""Tests that models which transformers can compute but Quire cannot serve are refused when they are loaded."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import (
    BartConfig,
    BartForCausalLM,
    BertConfig,
    BertLMHeadModel,
    BloomConfig,
    GptOssConfig,
    GraniteConfig,
    Lfm2Config,
    Llama4TextConfig,
    MambaConfig,
    MptConfig,
    PreTrainedConfig,
    PreTrainedModel,
    Qwen3NextConfig,
    RobertaConfig,
    RobertaForCausalLM,
)

from kernels.load import ops
from services.worker.checkpoint.model_folder import ModelFolder
from services.worker.checkpoint.weight_files import WeightFiles
from services.worker.config import WorkerConfig
from services.worker.models.fallback.max_positions import max_positions
from services.worker.models.fallback.model import load
from services.worker.models.load import LoadedModel, load_model
from shared.errors import ModelError
from tests.models.fallback_models import GROUPED, SIZES, granite
from tests.models.tiny_models import save, tiny

CPU = torch.device("cpu")


def served(folder: Path, **config: Any) -> LoadedModel:
    return load_model(folder, WorkerConfig(device="cpu", **config), CPU, ops(CPU))


def set_config(folder: Path, **changes: Any) -> None:
    path = folder / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))


SINKS = GptOssConfig(**(GROUPED | {"num_local_experts": 4, "head_dim": 12, "pad_token_id": 0}))
CHUNKS = Llama4TextConfig(
    **(GROUPED | {"attention_chunk_size": 6, "num_local_experts": 2, "head_dim": 12, "intermediate_size_mlp": 72})
)
CONVOLUTIONS = Lfm2Config(**(GROUPED | {"layer_types": ["conv", "full_attention", "conv"]}))
HYBRID = Qwen3NextConfig(
    **(
        GROUPED
        | {"layer_types": ["linear_attention", "full_attention", "linear_attention"], "head_dim": 12}
        | {"linear_num_value_heads": 4, "linear_num_key_heads": 2, "linear_key_head_dim": 8, "linear_value_head_dim": 8}
        | {
            "num_experts": 4,
            "num_experts_per_tok": 2,
            "moe_intermediate_size": 16,
            "shared_expert_intermediate_size": 16,
        }
    )
)


@pytest.mark.parametrize(
    ("config", "reason"),
    [
        (SINKS, "GptOssAttention asks its attention for s_aux"),
        (CHUNKS, "some attention of it is neither causal nor of a sliding window"),
        (CONVOLUTIONS, "gives other logits: it keeps other state"),
    ],
    ids=["sinks", "chunked attention", "convolutions"],
)
def test_other_attention_and_other_state(config: PreTrainedConfig, reason: str, tmp_path: Path) -> None:
    model = tiny(config)
    save(model, tmp_path)
    with pytest.raises(ModelError, match=f"{type(model).__name__} cannot be served through transformers: .*{reason}"):
        served(tmp_path)


def bert() -> PreTrainedModel:
    return BertLMHeadModel(BertConfig(**SIZES | {"pad_token_id": 0}, is_decoder=False, attn_implementation="eager"))


def roberta() -> PreTrainedModel:
    return RobertaForCausalLM(RobertaConfig(**SIZES | {"pad_token_id": 1}, is_decoder=True))


def bart() -> PreTrainedModel:
    sizes = {"vocab_size": 263, "d_model": 48, "max_position_embeddings": 128, "init_std": 0.3, "decoder_layers": 2}
    return BartForCausalLM(BartConfig(**sizes, decoder_attention_heads=4, decoder_ffn_dim=72, is_decoder=True))


@pytest.mark.parametrize("make", [bert, roberta, bart], ids=["bidirectional", "positions", "positions of a cache"])
def test_models_that_are_no_decoders_of_today(make: Any, tmp_path: Path) -> None:
    save(make(), tmp_path)
    with pytest.raises(ModelError, match="cannot be served through transformers"):
        served(tmp_path)


@pytest.mark.parametrize(
    ("config", "reason"),
    [
        (HYBRID, "gives other logits: it keeps other state"),
        (BloomConfig(vocab_size=263, hidden_size=48, n_layer=2, n_head=4), "its attention cannot be replaced"),
        (MptConfig(vocab_size=263, d_model=48, n_layers=2, n_heads=4, max_seq_len=128), "attention cannot be replaced"),
        (MambaConfig(vocab_size=263, hidden_size=48, num_hidden_layers=2, state_size=8), "how long a context may be"),
    ],
    ids=["linear attention", "position biases", "position biases, again", "no attention"],
)
def test_the_sanity_check_does_not_need_the_first_look(config: PreTrainedConfig, reason: str, tmp_path: Path) -> None:
    """`choose` refuses these by the text of their files; `load` must not rely on it."""
    model = tiny(config)
    save(model, tmp_path)
    name = type(model).__name__
    with pytest.raises(ModelError, match=rf"{name} is not supported"):
        served(tmp_path)
    with pytest.raises(ModelError, match=rf"{name} cannot be served through transformers: .*{reason}"):
        load(tmp_path, name, WeightFiles(ModelFolder.read(tmp_path)), torch.float32, CPU, ops(CPU))


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return save(granite(), tmp_path)


def test_a_missing_weight_is_named(folder: Path) -> None:
    tensors = load_file(folder / "model.safetensors")
    del tensors["model.layers.1.mlp.up_proj.weight"]
    save_file(tensors, folder / "model.safetensors")
    with pytest.raises(ModelError, match=r"tensor model\.layers\.1\.mlp\.up_proj\.weight is missing$"):
        served(folder)


def test_a_wrong_shape_is_named(folder: Path) -> None:
    tensors = load_file(folder / "model.safetensors")
    tensors["model.norm.weight"] = torch.ones(47)
    save_file(tensors, folder / "model.safetensors")
    with pytest.raises(ModelError, match=r"model\.norm\.weight has shape \[47\], and config\.json says \[48\]"):
        served(folder)


def test_quantised_weights_are_refused(folder: Path) -> None:
    tensors = load_file(folder / "model.safetensors")
    tensors["model.norm.weight"] = torch.ones(48, dtype=torch.int8)
    save_file(tensors, folder / "model.safetensors")
    with pytest.raises(ModelError, match=r"tensor model\.norm\.weight is of torch\.int8"):
        served(folder)
    set_config(folder, quantization_config={"quant_method": "fp8"})
    with pytest.raises(ModelError, match="quantization_config"):
        served(folder)


def test_extra_tensors_give_a_warning(folder: Path, caplog: pytest.LogCaptureFixture) -> None:
    tensors = load_file(folder / "model.safetensors")
    save_file(tensors | {"extra": torch.ones(1)}, folder / "model.safetensors")
    assert served(folder).model.shape.architecture == "GraniteForCausalLM"
    assert [record.getMessage() for record in caplog.records] == [
        "tensors that the model has no place for are left out: extra"
    ]


def test_a_config_of_another_model_is_refused(folder: Path) -> None:
    set_config(folder, architectures=["Olmo2ForCausalLM"])
    with pytest.raises(ModelError, match="model_type 'granite' is not that of Olmo2ForCausalLM"):
        served(folder)
    set_config(folder, architectures=["GraniteForCausalLM"], hidden_size="many")
    with pytest.raises(ModelError, match="transformers cannot build GraniteForCausalLM"):
        served(folder)


@pytest.mark.parametrize(
    ("rope", "longest"),
    [
        ({"rope_type": "default"}, 128),
        ({"rope_type": "linear", "factor": 4.0}, 512),
        ({"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64}, 256),
        ({"rope_type": "dynamic", "factor": 4.0}, 128),
        ({"rope_type": "longrope", "factor": 4.0, "original_max_position_embeddings": 32,
          "short_factor": [1.0] * 6, "long_factor": [2.0] * 6}, 32),
    ],
)  # fmt: skip
def test_the_context_ends_where_angles_would_change(rope: dict[str, Any], longest: int) -> None:
    assert max_positions(GraniteConfig(**(GROUPED | {"rope_parameters": {"rope_theta": 1e4} | rope}))) == longest


def test_fingerprints_tell_the_implementations_apart(tmp_path: Path) -> None:
    from tests.models.tiny_models import llama

    save(llama(), tmp_path)
    native, theirs = served(tmp_path), served(tmp_path, model_impl="transformers")
    assert native.fingerprint != theirs.fingerprint
    assert theirs.fingerprint == served(tmp_path, model_impl="transformers").fingerprint
