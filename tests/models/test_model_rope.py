"""Compares rotary tables with transformers' modules, for every spelling of config.json."""

from typing import Any

import pytest
import torch
from transformers import LlamaConfig, Phi3Config
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding
from transformers.models.phi3.modeling_phi3 import Phi3RotaryEmbedding

from services.worker.checkpoint.config_json import ConfigJson
from services.worker.models.decoder.attention import rope_table
from services.worker.models.decoder.rope import read_max_positions, read_rope
from services.worker.models.families import phi3
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
    "both, the older first": {
        "rope_scaling": {"rope_type": "linear", "factor": 2.0}, "rope_parameters": {"rope_type": "llama3", **LLAMA3},
    },
    "both, each with a theta": {
        "rope_scaling": {"type": "linear", "factor": 2.0, "rope_theta": 300.0},
        "rope_parameters": {"rope_type": "default", "rope_theta": 77.0},
    },
    "both, theta in the newer": {
        "rope_scaling": {"rope_type": "linear", "factor": 2.0},
        "rope_parameters": {"rope_type": "default", "rope_theta": 77.0},
    },
    "both, theta on top": {
        "rope_scaling": {"rope_type": "linear", "factor": 2.0}, "rope_theta": 50.0,
        "rope_parameters": {"rope_type": "default", "rope_theta": 77.0},
    },
    "both, the older empty": {
        "rope_scaling": {}, "rope_theta": 50.0, "rope_parameters": {"rope_type": "default", "rope_theta": 77.0},
    },
    "yarn, tuned": {
        "rope_parameters": {
            "rope_type": "yarn", "rope_theta": 900.0, "factor": 4.0, "original_max_position_embeddings": 16,
            "beta_fast": 16.0, "beta_slow": 2.0, "attention_factor": 1.25,
        }
    },
}  # fmt: skip


@pytest.mark.parametrize("spelling", SPELLINGS.values(), ids=SPELLINGS.keys())
def test_tables_equal_those_of_transformers(spelling: dict[str, Any]) -> None:
    """LDG-04. LDG-22 is the case with both `rope_scaling` and `rope_parameters`."""
    length = 300  # longer than any original length here
    cos, sin = rope_table(read_rope(ConfigJson(BASE | spelling), 12), length, torch.device("cpu"))
    rotary = LlamaRotaryEmbedding(LlamaConfig(**(BASE | _copy(spelling))))
    their_cos, their_sin = rotary(torch.zeros(1), torch.arange(length)[None])
    torch.testing.assert_close(cos, their_cos[0], atol=1e-6, rtol=0)
    torch.testing.assert_close(sin, their_sin[0], atol=1e-6, rtol=0)


PARTIAL = {"partial_rotary_factor": 0.5, "rope_theta": 700.0}
LONGROPE = {"short_factor": [1.0, 1.5, 2.0], "long_factor": [2.0, 5.0, 30.0]}
ORIGINAL = {"original_max_position_embeddings": 16}


@pytest.mark.parametrize(
    "spelling",
    [
        PARTIAL,
        PARTIAL | ORIGINAL | {"rope_scaling": {"type": "longrope", **LONGROPE}},
        PARTIAL | ORIGINAL | {"rope_scaling": {"type": "su", **ORIGINAL, **LONGROPE}},
        PARTIAL | ORIGINAL | {"rope_scaling": {"type": "yarn", **LONGROPE}},
        ORIGINAL | {"rope_parameters": {"rope_type": "longrope", **PARTIAL, **LONGROPE}},
    ],
    ids=["plain", "longrope", "su", "yarn", "inside"],
)
@pytest.mark.parametrize("served", [15, 16, 17, 60])
def test_a_part_of_each_head_and_longrope(spelling: dict[str, Any], served: int) -> None:
    """The longest context that is served decides between short and long factors."""
    sizes = BASE | {"vocab_size": 10, "intermediate_size": 5, "num_hidden_layers": 1}
    config = Phi3Config(**(sizes | {"pad_token_id": 0, "eos_token_id": 2} | _copy(spelling)))
    spec = phi3.read_spec(ConfigJson(sizes | spelling))
    rope = spec.layers[0].rope
    assert rope is not None
    assert len(rope.inverse_frequencies) == 3
    cos, sin = rope_table(rope, served + 1, torch.device("cpu"))
    their_cos, their_sin = Phi3RotaryEmbedding(config)(torch.zeros(1), torch.arange(served)[None])
    torch.testing.assert_close(cos[:-1], their_cos[0], atol=1e-6, rtol=0)
    torch.testing.assert_close(sin[:-1], their_sin[0], atol=1e-6, rtol=0)


@pytest.mark.parametrize("name", ["short_factor", "long_factor"])
def test_a_wrong_number_of_factors_is_refused(name: str) -> None:
    scaling = {"type": "longrope", "short_factor": [1.0] * 6, "long_factor": [1.0] * 6} | {name: [1.0] * 5}
    with pytest.raises(ModelError, match=f"{name} has 5 numbers instead of 6"):
        read_rope(ConfigJson(BASE | {"rope_scaling": scaling}), 12)


def test_a_factor_for_each_frequency() -> None:
    factors = [1.0, 1.0, 1.25, 2.0, 4.0, 8.0]
    rope = read_rope(
        ConfigJson(BASE | {"rope_parameters": {"rope_type": "factors", "factors": factors, "rope_theta": 500.0}}), 12
    )
    plain = read_rope(ConfigJson(BASE | {"rope_theta": 500.0}), 12)
    assert rope.inverse_frequencies == pytest.approx(
        [frequency / factor for frequency, factor in zip(plain.inverse_frequencies, factors, strict=True)], rel=1e-6
    )
    assert rope.attention_factor == 1
    with pytest.raises(ModelError, match="factors has 5 numbers instead of 6"):
        read_rope(ConfigJson(BASE | {"rope_parameters": {"rope_type": "factors", "factors": factors[1:]}}), 12)
    with pytest.raises(ModelError, match="factors is missing"):
        read_rope(ConfigJson(BASE | {"rope_parameters": {"rope_type": "factors"}}), 12)


def _copy(spelling: dict[str, Any]) -> dict[str, Any]:
    """Return a copy, since transformers writes into the mapping that it gets."""
    return {key: dict(value) if isinstance(value, dict) else value for key, value in spelling.items()}


@pytest.mark.parametrize("rope_type", ["dynamic", "proportional", "mystery"])
@pytest.mark.parametrize("key", ["type", "rope_type"])
def test_other_types_are_refused_by_name(rope_type: str, key: str) -> None:
    """LDG-04: a family's code refuses them; transformers' may serve one that it knows, as it does `dynamic`."""
    supported = "default, factors, linear, llama3, yarn, longrope"
    with pytest.raises(ModelError, match=f"'{rope_type}' is not supported.*{supported}"):
        read_rope(ConfigJson(BASE | {"rope_scaling": {key: rope_type, "factor": 2.0}}), 12)


@pytest.mark.parametrize(
    "scaling", [{"type": "linear"}, {"rope_type": "llama3", "factor": 2.0}, {"type": 5}, "linear", {"rope_theta": "x"}]
)
def test_incomplete_scalings_are_refused(scaling: Any) -> None:
    with pytest.raises(ModelError, match="rope"):
        read_rope(ConfigJson(BASE | {"rope_scaling": scaling}), 12)


@pytest.mark.parametrize(
    ("spelling", "positions"),
    [("nothing", 64), ("linear, old key", 128), ("llama3", 64), ("yarn", 64), ("yarn, tuned", 64)],
)
def test_longest_context(spelling: str, positions: int) -> None:
    """LDG-04."""
    assert read_max_positions(ConfigJson(BASE | SPELLINGS[spelling]), 2048) == positions


def test_yarn_without_an_original_length() -> None:
    config = ConfigJson(BASE | {"rope_scaling": {"type": "yarn", "factor": 4.0}})
    assert read_max_positions(config, 2048) == 256
    cos, _ = rope_table(read_rope(config, 12), 8, torch.device("cpu"))
    rotary = LlamaRotaryEmbedding(LlamaConfig(**(BASE | {"rope_scaling": {"type": "yarn", "factor": 4.0}})))
    torch.testing.assert_close(cos, rotary(torch.zeros(1), torch.arange(8)[None])[0][0], atol=1e-6, rtol=0)
