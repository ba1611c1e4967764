"""Tests which code is chosen for a model, or why none is: from its config.json alone, without torch."""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from msgspec.structs import replace

from services.worker.checkpoint.config_json import ConfigJson
from services.worker.models.fallback.catalog import causal_models, with_replaceable_attention
from services.worker.models.registry import (
    ARCHITECTURES,
    Implementation,
    ModelImpl,
    choose_implementation,
    load_family,
    read_supported,
)
from shared.errors import ModelError

ROOT = Path(__file__).parents[2]


def config(*architectures: str, **fields: Any) -> dict[str, Any]:
    return {"architectures": list(architectures)} | fields


def chosen(fields: dict[str, Any], model_impl: ModelImpl = "auto") -> Implementation:
    return choose_implementation(ConfigJson(fields), model_impl)


def test_a_family_comes_first_and_transformers_next() -> None:
    assert chosen(config("LlamaForCausalLM")) == Implementation("LlamaForCausalLM", True)
    assert chosen(config("LlamaForCausalLM"), "transformers") == Implementation("LlamaForCausalLM", False)
    assert chosen(config("GraniteForCausalLM")) == Implementation("GraniteForCausalLM", False)
    assert chosen(config("Other", "GraniteForCausalLM")) == Implementation("GraniteForCausalLM", False)


@pytest.mark.parametrize(
    ("described", "said"),
    [
        (config("NoSuchForCausalLM"), "architecture NoSuchForCausalLM is not supported; `quire models` lists"),
        (config("MambaForCausalLM"), "MambaForCausalLM is not supported: in transformers' code for it"),
        (config("BloomForCausalLM"), "BloomForCausalLM is not supported: in transformers' code for it"),
        (config("T5ForConditionalGeneration", is_encoder_decoder=True), "T5.* it is an encoder with a decoder"),
        (config("TheirsForCausalLM", auto_map={"AutoModelForCausalLM": "a.B"}), r"Theirs.*\(auto_map\).* never run"),
        ({"model_type": "t5"}, "no architectures named, and model_type 't5' is no causal language model's"),
        ({}, "no architectures named, and model_type None"),
        (config("TheirsForCausalLM", model_type="llama", auto_map={"AutoModelForCausalLM": "a.B"}), "never run"),
        (config("LlamaForSequenceClassification", model_type="llama"), "LlamaForSequenceClassification is not supp"),
        ({"architectures": 1.5, "model_type": "llama"}, "architectures"),
    ],
)
def test_what_cannot_be_served_is_said(described: dict[str, Any], said: str) -> None:
    with pytest.raises(ModelError, match=said):
        chosen(described)


@pytest.mark.parametrize(
    "names", [{}, *({"architectures": value} for value in (None, [], "", ["LlamaModel"], ["LLaMAForCausalLM"]))]
)
def test_without_a_class_of_causal_models_the_type_counts(names: dict[str, Any]) -> None:
    """LDG-22: transformers decides by it alone."""
    assert chosen({"model_type": "llama"} | names) == Implementation("LlamaForCausalLM", True)
    assert chosen({"model_type": "gemma3_text"} | names) == Implementation("Gemma3ForCausalLM", True)
    assert chosen({"model_type": "granite"} | names) == Implementation("GraniteForCausalLM", False)


def test_an_architecture_may_be_a_plain_string() -> None:
    """LDG-22."""
    assert chosen({"architectures": "LlamaForCausalLM"}) == Implementation("LlamaForCausalLM", True)
    assert chosen({"architectures": "GraniteForCausalLM"}) == Implementation("GraniteForCausalLM", False)


def test_families_only_by_wish() -> None:
    with pytest.raises(ModelError, match=r"--model-impl quire: no family of architecture GraniteForCausalLM \(there"):
        chosen(config("GraniteForCausalLM"), "quire")


def test_every_architecture_of_the_table_has_its_module() -> None:
    for name in ARCHITECTURES:
        assert load_family(name).read_spec


def test_what_transformers_has_is_what_its_own_tables_say() -> None:
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

    assert causal_models() == set(MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.values())
    replaceable = with_replaceable_attention()
    assert {"GPTNeoXForCausalLM", "Cohere2ForCausalLM", "DeepseekV3ForCausalLM", *ARCHITECTURES} <= replaceable
    assert not replaceable & {"MambaForCausalLM", "RecurrentGemmaForCausalLM", "BloomForCausalLM", "RwkvForCausalLM"}


def test_the_question_needs_no_torch(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(config("GraniteForCausalLM")))
    assert read_supported(tmp_path)[1] == Implementation("GraniteForCausalLM", native=False)
    script = (
        "import sys; from pathlib import Path; from quire.startup_checks import read_supported; "
        f"read_supported(Path({str(tmp_path)!r})); print('torch' in sys.modules, 'transformers' in sys.modules)"
    )
    result = subprocess.run([sys.executable, "-c", script], cwd=ROOT, capture_output=True, text=True, check=True)
    assert result.stdout == "False False\n"


def test_no_family_has_layer_norms_of_queries_and_keys() -> None:
    """`rotate_and_store` knows root-mean-square norms only."""
    fields = {"vocab_size": 9, "hidden_size": 8, "intermediate_size": 8, "num_attention_heads": 2}
    spec = load_family("Qwen3ForCausalLM").read_spec(ConfigJson({**fields, "num_hidden_layers": 1}))
    with pytest.raises(ModelError, match="no kernel"):
        replace(spec, norm="layer")
