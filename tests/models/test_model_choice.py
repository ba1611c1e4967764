"""Tests that transformers' code serves a config.json that asks for what a family lacks, if it can.

The logits are those of transformers, one line in the log says whose code it is, and `quire models` says the same.
"""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import PreTrainedModel

from kernels.load import ops
from quire.models import describe
from services.worker.config import WorkerConfig
from services.worker.models.decoder.decoder import Decoder
from services.worker.models.fallback.model import TransformersModel
from services.worker.models.load import load_model
from shared.errors import ModelError
from tests.models.family_variants import gemma, gemma2, gemma3, gpt2, mistral, mixtral, phi3, qwen2, qwen3_moe
from tests.models.tiny_models import (
    Forward,
    llama,
    opt,
    quire_logits,
    rewrite_weights,
    save,
    set_config,
    transformers_logits,
)

TOKENS = [5, 9, 100, 3, 77, 12, 44, 2, 90, 17, 23]
Make = Callable[..., PreTrainedModel]


def assert_served(folder: Path, decoder: type, caplog: pytest.LogCaptureFixture) -> None:
    """Fail unless `decoder` serves the folder, with transformers' logits."""
    forward = Forward(folder)
    assert isinstance(forward.decoder, decoder)
    forward.enter(0, TOKENS, [2, 0, 1])
    (ours,) = forward.step((0, 0, len(TOKENS)))
    theirs = transformers_logits(folder, TOKENS)
    assert theirs.std() > 0.2  # or the comparison would mean nothing
    assert (ours - theirs).abs().max() < 1e-4
    said = [record.getMessage() for record in caplog.records]
    if decoder is Decoder:
        assert not said
        assert describe(str(folder)).endswith(": a family of Quire's own\n")
    else:
        assert len(said) == 1
        reason, _, line = said[0].rpartition(": ")
        architecture = forward.decoder.shape.architecture
        assert line == f"{architecture} is loaded by transformers' code instead of Quire's own"
        code = "through transformers, if the model passes its sanity check when loaded"
        assert describe(str(folder)) == f"{architecture}: {code} ({reason})\n"


TANH = ("gelu_new", "gelu_fast", "gelu_pytorch_tanh", "gelu_accurate")


@pytest.mark.parametrize("name", [*TANH, "relu", "gelu", "silu", "swish", "quick_gelu", "gelu_python", "relu2"])
@pytest.mark.parametrize("make", [gpt2, opt])
def test_activations_without_a_gate(make: Make, name: str, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """LDG-24: Cerebras-GPT is a GPT-2 with gelu, Galactica an OPT."""
    save(make(activation_function=name), tmp_path)
    assert_served(tmp_path, Decoder if name in (*TANH, "relu") else TransformersModel, caplog)


@pytest.mark.parametrize("name", ["silu", "swish", "gelu_new", "gelu_pytorch_tanh", "gelu", "relu"])
@pytest.mark.parametrize(
    ("make", "field"),
    [(llama, "hidden_act"), (qwen3_moe, "hidden_act"), (phi3, "hidden_act"), (gemma2, "hidden_activation")],
)
def test_activations_of_a_gate(
    make: Make, field: str, name: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """LDG-24."""
    save(make(), tmp_path)
    set_config(tmp_path, **{field: name})
    assert_served(tmp_path, TransformersModel if name in ("gelu", "relu") else Decoder, caplog)


OTHERS: list[tuple[Make, dict[str, Any]]] = [
    (gpt2, {"scale_attn_by_inverse_layer_idx": True}),
    (lambda: gpt2(add_cross_attention=True), {}),
    (lambda: opt(layer_norm_elementwise_affine=False), {}),
    (gemma3, {"attn_logit_softcapping": 2.0}),
    (gemma, {"hidden_act": "quick_gelu"}),
    (mixtral, {"hidden_act": "gelu"}),
    (mistral, {"rope_parameters": {"rope_type": "dynamic", "factor": 2.0, "rope_theta": 1e4}}),
]


@pytest.mark.parametrize(("make", "changes"), OTHERS, ids=[" ".join(changes) or "more" for _, changes in OTHERS])
def test_other_fields(make: Make, changes: dict[str, Any], tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """LDG-24."""
    save(make(), tmp_path)
    set_config(tmp_path, **changes)
    assert_served(tmp_path, TransformersModel, caplog)


def test_a_field_of_which_only_transformers_has_a_default(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """LDG-24."""
    save(gpt2(vocab_size=50257, n_embd=20), tmp_path)
    set_config(tmp_path, "vocab_size")
    assert_served(tmp_path, TransformersModel, caplog)


def test_a_rope_that_changes_with_the_length_ends_where_it_would(tmp_path: Path) -> None:
    """LDG-24, LDG-04: families refuse it, since cached keys cannot be rotated again."""
    save(llama(rope_parameters={"rope_type": "dynamic", "factor": 4.0, "rope_theta": 1e4}), tmp_path)
    model = load_model(tmp_path, WorkerConfig(device="cpu"), torch.device("cpu"), ops(torch.device("cpu")))
    assert model.model.shape.max_positions == 128


@pytest.mark.parametrize(
    ("make", "changes", "said"),
    [
        (gpt2, {"activation_function": "nonsense"}, "activation_function 'nonsense' .*; .*KeyError: 'nonsense'"),
        (llama, {"hidden_act": "nonsense"}, "hidden_act 'nonsense' is not supported .*; .*'nonsense'"),
        (llama, {"rope_parameters": {"rope_type": "mystery", "rope_theta": 1e4}}, "rope_type 'mystery' .*; .*mystery"),
        (qwen2, {"layer_types": ["full_attention", "chunked_attention", "full_attention"]}, "'chunked_attention'.*; "),
        (gemma, {"use_bidirectional_attention": True}, "use_bidirectional_attention true is not supported$"),
        (llama, {"partial_rotary_factor": 0.4}, "partial_rotary_factor 0.4 is not supported for this architecture$"),
        (llama, {"num_hidden_layers": None}, "num_hidden_layers is missing$"),
        (llama, {"num_key_value_heads": 4}, "num_attention_heads is 6, no multiple of num_key_value_heads, 4$"),
    ],
)
def test_what_nobody_can_serve_is_refused(make: Make, changes: dict[str, Any], said: str, tmp_path: Path) -> None:
    """LDG-24: one line names the folder once, and gives both reasons if both were tried."""
    save(make(), tmp_path)
    set_config(tmp_path, **changes)
    with pytest.raises(ModelError, match=said) as caught:
        quire_logits(tmp_path, TOKENS)
    text = str(caught.value)
    assert text.startswith(f"{tmp_path}: ")
    assert text.count(str(tmp_path)) == 1
    assert "\n" not in text


@pytest.mark.parametrize("make", [gpt2, opt])
def test_a_family_that_was_asked_for_refuses_what_it_lacks(make: Make, tmp_path: Path) -> None:
    """LDG-24."""
    save(make(activation_function="gelu"), tmp_path)
    with pytest.raises(ModelError, match=r"activation_function 'gelu' is not supported .*relu\)$"):
        quire_logits(tmp_path, TOKENS, model_impl="quire")


def test_random_weights_are_served_by_the_same_code(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """LDG-24."""
    save(gpt2(activation_function="gelu"), tmp_path)
    (tmp_path / "model.safetensors").unlink()
    forward = Forward(tmp_path, load_format="dummy", dtype="float32")
    assert isinstance(forward.decoder, TransformersModel)
    assert len(caplog.records) == 1


def test_the_code_that_serves_a_folder_depends_on_its_tensors_too(tmp_path: Path) -> None:
    """LDG-23: `quire models` says what serving does, and refuses what it refuses.

    Where there are no weights, config.json counts.
    """
    save(llama(), tmp_path)
    rewrite_weights(tmp_path, lambda t: {f"model.{name}" if name != "lm_head.weight" else name: t[name] for name in t})
    line = describe(str(tmp_path))
    assert "through transformers, if the model passes its sanity check when loaded (tensor model." in line
    rewrite_weights(tmp_path, lambda tensors: {name: tensors[name] for name in tensors if "norm" not in name})
    set_config(tmp_path, num_hidden_layers=60)
    with pytest.raises(ModelError, match="is missing") as caught:
        describe(str(tmp_path))
    assert str(caught.value).startswith(f"{tmp_path}: ")
    (tmp_path / "model.safetensors").unlink()
    assert describe(str(tmp_path)) == "LlamaForCausalLM: a family of Quire's own\n"
