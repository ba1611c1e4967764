"""The longest context of a model of transformers, from its config."""

from collections.abc import Mapping
from typing import Any

from services.worker.checkpoint.config_json import ConfigJson
from services.worker.models.decoder.rope import read_max_positions
from shared.errors import ModelError

_NAMES = (
    "max_position_embeddings", "n_positions", "max_sequence_length", "max_seq_len", "seq_length", "n_ctx",
)  # fmt: skip
_LENGTH_DEPENDENT = ("dynamic", "longrope")
"""Types of rotary scaling whose angles change if a sequence is longer than the original context. Keys that are cached
before would be wrong then, so the original context is the limit."""


def max_positions(config: Any) -> int:
    """Return the longest context, in tokens, for a `PreTrainedConfig`. Raise ModelError if no field says it."""
    text_config = config.get_text_config()
    positions = next((value for name in _NAMES if isinstance(value := getattr(text_config, name, None), int)), None)
    if positions is None:
        raise ModelError(f"config.json: none of {', '.join(_NAMES)} says how long a context may be")
    rope = getattr(text_config, "rope_parameters", None) or {}
    by_layer = rope and all(isinstance(value, dict) for value in rope.values())
    ropes = list(rope.values()) if by_layer else [rope]
    length_dependent = [rope for rope in ropes if rope.get("rope_type") in _LENGTH_DEPENDENT]
    if length_dependent:
        return min(int(rope.get("original_max_position_embeddings") or positions) for rope in length_dependent)
    return max(_extended(positions, rope) for rope in ropes)


def _extended(positions: int, rope: Mapping[str, Any]) -> int:
    """Return `positions`, extended by the scaling of a rope."""
    return read_max_positions(
        ConfigJson({"max_position_embeddings": positions, "rope_parameters": dict(rope)}), positions
    )
