"""Rotary tables against transformers' own modules, in every spelling of config.json."""

from typing import Any

import pytest
import torch
from transformers import LlamaConfig
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

from services.worker.models.attention import rope_table
from services.worker.models.rope import read_max_positions, read_rope
from shared.errors import ModelError

BASE: dict[str, Any] = {"hidden_size": 48, "num_attention_heads": 4, "head_dim": 12, "max_position_embeddings": 64}
LLAMA3 = {
    "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 32,
}  # fmt: skip
SPELLINGS: dict[str, dict[str, Any]] = {
    "nothing": {},
    "null": {"rope_scaling": None, "rope_theta": 500.0},
    "theta on top": {"rope_theta": 5000.0},
    "theta inside": {"rope_parameters": {"rope_type": "default", "rope_theta": 5000.0}},
    "linear, old key": {"rope_scaling": {"type": "linear", "factor": 2.0}, "rope_theta": 300.0},
    "linear, new key": {"rope_scaling": {"rope_type": "linear", "factor": 2.0}},
    "linear, both keys": {"rope_scaling": {"rope_type": "linear", "type": "linear", "factor": 2.5}},
    "llama3": {"rope_scaling": {"rope_type": "llama3", **LLAMA3}, "rope_theta": 500.0},
    "llama3, inside": {"rope_parameters": {"rope_type": "llama3", "rope_theta": 500.0, **LLAMA3}},
    "yarn": {"rope_scaling": {"type": "yarn", "factor": 4.0, "original_max_position_embeddings": 16}},
    "yarn, tuned": {
        "rope_parameters": {
            "rope_type": "yarn", "rope_theta": 900.0, "factor": 4.0, "original_max_position_embeddings": 16,
            "beta_fast": 16.0, "beta_slow": 2.0, "attention_factor": 1.25,
        }
    },
}  # fmt: skip


@pytest.mark.parametrize("spelling", SPELLINGS.values(), ids=SPELLINGS.keys())
def test_tables_equal_those_of_transformers(spelling: dict[str, Any]) -> None:
    length = 300  # beyond any original length here
    cos, sin = rope_table(read_rope(BASE | spelling, 12), length, torch.device("cpu"))
    their = LlamaRotaryEmbedding(LlamaConfig(**(BASE | _fresh(spelling))))
    their_cos, their_sin = their(torch.zeros(1), torch.arange(length)[None])
    torch.testing.assert_close(cos, their_cos[0], atol=1e-6, rtol=0)
    torch.testing.assert_close(sin, their_sin[0], atol=1e-6, rtol=0)


def _fresh(spelling: dict[str, Any]) -> dict[str, Any]:
    """Transformers writes into the mapping it is given."""
    return {key: dict(value) if isinstance(value, dict) else value for key, value in spelling.items()}


@pytest.mark.parametrize("kind", ["dynamic", "proportional", "mystery"])
@pytest.mark.parametrize("key", ["type", "rope_type"])
def test_other_kinds_are_refused_by_name(kind: str, key: str) -> None:
    known = "default, factors, linear, llama3, yarn, longrope"
    with pytest.raises(ModelError, match=f"'{kind}' is not supported.*{known}"):
        read_rope(BASE | {"rope_scaling": {key: kind, "factor": 2.0}}, 12)


@pytest.mark.parametrize(
    "scaling", [{"type": "linear"}, {"rope_type": "llama3", "factor": 2.0}, {"type": 5}, "linear", {"rope_theta": "x"}]
)
def test_incomplete_scalings_are_refused(scaling: Any) -> None:
    with pytest.raises(ModelError, match="rope"):
        read_rope(BASE | {"rope_scaling": scaling}, 12)


@pytest.mark.parametrize(
    ("spelling", "positions"),
    [("nothing", 64), ("linear, old key", 128), ("llama3", 64), ("yarn", 64), ("yarn, tuned", 64)],
)
def test_longest_context(spelling: str, positions: int) -> None:
    assert read_max_positions(BASE | SPELLINGS[spelling], 2048) == positions


def test_yarn_without_an_original_length() -> None:
    config = BASE | {"rope_scaling": {"type": "yarn", "factor": 4.0}}
    assert read_max_positions(config, 2048) == 256
    cos, _ = rope_table(read_rope(config, 12), 8, torch.device("cpu"))
    their = LlamaRotaryEmbedding(LlamaConfig(**(BASE | {"rope_scaling": {"type": "yarn", "factor": 4.0}})))
    torch.testing.assert_close(cos, their(torch.zeros(1), torch.arange(8)[None])[0][0], atol=1e-6, rtol=0)
