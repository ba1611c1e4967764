"""The longest context of a model that transformers computes, by its config."""

from collections.abc import Mapping
from typing import Any

from services.worker.checkpoint.config_json import ConfigJson
from services.worker.models.decoder.rope import read_max_positions
from shared.errors import ModelError

_NAMES = (
    "max_position_embeddings", "n_positions", "max_sequence_length", "max_seq_len", "seq_length", "n_ctx",
)  # fmt: skip
_LENGTH_DEPENDENT = ("dynamic", "longrope")
"""Types of rotary scaling whose angles change once a sequence is longer than the model's original context, which is
the limit for this reason."""


def max_positions(config: Any) -> int:
    """Return the longest context by a `PreTrainedConfig`. Raise ModelError if the config names none."""
    text = config.get_text_config()
    named = next((value for name in _NAMES if isinstance(value := getattr(text, name, None), int)), None)
    if named is None:
        raise ModelError(f"config.json: none of {', '.join(_NAMES)} says how long a context may be")
    rope = getattr(text, "rope_parameters", None) or {}
    by_layer = rope and all(isinstance(value, dict) for value in rope.values())
    ropes = list(rope.values()) if by_layer else [rope]
    length_dependent = [rope for rope in ropes if rope.get("rope_type") in _LENGTH_DEPENDENT]
    if length_dependent:  # keys cached under one set of angles would be wrong under another
        return min(int(rope.get("original_max_position_embeddings") or named) for rope in length_dependent)
    return max(_extended(named, rope) for rope in ropes)


def _extended(positions: int, rope: Mapping[str, Any]) -> int:
    return read_max_positions(
        ConfigJson({"max_position_embeddings": positions, "rope_parameters": dict(rope)}), positions
    )
