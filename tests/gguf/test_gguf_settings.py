"""Tests that metadata which no model can have, or which means another model, is refused in one line with its key."""

import json
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from transformers import PreTrainedModel

from shared.errors import ModelError
from shared.gguf.folder import model_folder
from tests.gguf.gguf_writer import write
from tests.models.family_variants import gemma2, gpt2, mixtral, phi3, qwen2
from tests.models.tiny_models import llama

SIZES = {"hidden_size": 64, "intermediate_size": 96, "num_attention_heads": 4, "num_hidden_layers": 1}
MODELS: dict[str, Callable[[], PreTrainedModel]] = {
    "llama": lambda: llama(**SIZES, num_key_value_heads=2),
    "qwen2": lambda: qwen2(**SIZES),
    "mixtral": lambda: mixtral(**SIZES),
    "gemma2": lambda: gemma2(**SIZES),
    "phi3": lambda: phi3(**SIZES),
    "gpt2": lambda: gpt2(n_embd=64, n_head=4, n_layer=1),
}

KEYS = [
    ("llama", {"llama.attention.head_count": 0}, "head_count is 0, and must be more than 0"),
    ("llama", {"llama.attention.head_count_kv": 0}, "head_count_kv is 0, and must be more than 0"),
    ("llama", {"llama.context_length": 0}, "context_length is 0, and must be more than 0"),
    ("llama", {"llama.block_count": -1}, "block_count is -1, and must be more than 0"),
    (
        "llama",
        {"llama.attention.head_count": 12, "llama.attention.head_count_kv": 4, "llama.rope.dimension_count": 5},
        "llama.attention.head_count makes heads of 5 dimensions, which must be even",
    ),
    ("llama", {"llama.attention.key_length": 15}, "key_length makes heads of 15 dimensions, which must be even"),
    ("llama", {"llama.rope.dimension_count": 8}, "llama.rope.dimension_count 8 is not the head's 16"),
    ("llama", {"llama.rope.freq_base": math.nan}, "llama.rope.freq_base is nan, which is no finite number"),
    ("llama", {"llama.rope.freq_base": math.inf}, "llama.rope.freq_base is inf, which is no finite number"),
    ("llama", {"llama.rope.freq_base": 0.0}, "llama.rope.freq_base is 0.0, and must be more than 0"),
    ("llama", {"llama.attention.layer_norm_rms_epsilon": math.nan}, "layer_norm_rms_epsilon is nan, which is no"),
    ("llama", {"llama.rope.scaling.type": "linear", "llama.rope.scaling.factor": -math.inf}, "factor is -inf"),
    ("llama", {"llama.rope.scaling.type": "longrope"}, "llama.rope.scaling.type 'longrope' is not supported"),
    ("mixtral", {"llama.expert_used_count": 9}, "llama.expert_used_count is 9 of 5 experts"),
    ("gemma2", {"gemma2.final_logit_softcapping": math.nan}, "gemma2.final_logit_softcapping is nan"),
    ("gemma2", {"gemma2.attn_logit_softcapping": 0.0}, "gemma2.attn_logit_softcapping is 0.0"),
    ("phi3", {"phi3.attention.key_length": 0}, "phi3.attention.key_length is 0, and must be more than 0"),
    ("phi3", {"phi3.rope.dimension_count": 18}, "dimension_count 18 must be even and at most the head's 16"),
    ("phi3", {"phi3.rope.dimension_count": 7}, "dimension_count 7 must be even and at most the head's 16"),
    ("phi3", {"phi3.rope.dimension_count": 0}, "dimension_count is 0, and must be more than 0"),
    ("phi3", {"phi3.rope.scaling.type": "yarn"}, "phi3.rope.scaling.type 'yarn' is not supported"),
    ("phi3", {"phi3.rope.scaling.factor": 4.0}, "phi3.rope.scaling.type 'linear' is not supported"),
    ("phi3", {"phi3.rope.scaling.type": "longrope"}, "tensor rope_factors_short.weight is missing, for 'longrope'"),
    ("gpt2", {"gpt2.attention.head_count": 0}, "gpt2.attention.head_count is 0, and must be more than 0"),
    ("gpt2", {"gpt2.attention.head_count": 5}, "gpt2.attention.head_count 5 does not divide the hidden size 64"),
    ("gpt2", {"gpt2.attention.layer_norm_epsilon": math.nan}, "gpt2.attention.layer_norm_epsilon is nan"),
]

ONES = np.ones(8, np.float32)
LONG, SHORT, FREQS = "rope_factors_long.weight", "rope_factors_short.weight", "rope_freqs.weight"
TENSORS = [
    ("phi3", {LONG: ONES}, f"tensor {SHORT} is missing, and there is {LONG}"),
    ("phi3", {SHORT: ONES}, f"tensor {LONG} is missing, and there is {SHORT}"),
    ("phi3", {SHORT: ONES, LONG: ONES * np.inf}, f"tensor {LONG} (F32 [8]): its numbers must be finite"),
    ("phi3", {FREQS: ONES}, f"tensor {FREQS} (F32 [8]): a Phi3ForCausalLM with these settings has no such tensor"),
    ("llama", {LONG: ONES}, f"tensor {LONG} (F32 [8]): a LlamaForCausalLM with these settings has no such"),
    ("qwen2", {SHORT: ONES}, f"tensor {SHORT} (F32 [8]): a Qwen2ForCausalLM with these settings has no such"),
    ("gpt2", {FREQS: ONES}, f"tensor {FREQS} (F32 [8]): a GPT2LMHeadModel with these settings has no such"),
    ("llama", {FREQS: ONES.astype(np.int32)}, f"tensor {FREQS} (I32 [8]): this type cannot be read (supported: F32"),
    ("llama", {FREQS: ONES * np.nan}, f"tensor {FREQS} (F32 [8]): its numbers must be finite and more than 0"),
    ("llama", {FREQS: ONES * 0}, f"tensor {FREQS} (F32 [8]): its numbers must be finite and more than 0"),
    ("mixtral", {"blk.0.ffn_gate_inp.weight": np.float32(3)}, "blk.0.ffn_gate_inp.weight (F32 []): there are 5"),
]


def refusal(file: Path) -> str:
    with pytest.raises(ModelError) as caught:
        model_folder(file, file.parent / "cache")
    message = str(caught.value)
    assert message.startswith(f"{file}: ")
    assert "\n" not in message
    return message


@pytest.mark.parametrize(("name", "extra", "message"), KEYS)
def test_an_impossible_setting(name: str, extra: dict[str, Any], message: str, tmp_path: Path) -> None:
    assert message in refusal(write(MODELS[name](), tmp_path / "model.gguf", extra=extra))


@pytest.mark.parametrize(("name", "others", "message"), TENSORS)
def test_impossible_factors(name: str, others: dict[str, Any], message: str, tmp_path: Path) -> None:
    assert message in refusal(write(MODELS[name](), tmp_path / "model.gguf", others=others))


def test_a_factor_without_a_type_means_linear_scaling(tmp_path: Path) -> None:
    file = write(MODELS["llama"](), tmp_path / "model.gguf", extra={"llama.rope.scaling.factor": 4.0})
    rope = json.loads((model_folder(file, tmp_path / "cache") / "config.json").read_bytes())["rope_parameters"]
    assert (rope["rope_type"], rope["factor"]) == ("linear", 4.0)
