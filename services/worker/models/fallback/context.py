"""The longest context of a model that transformers describes: the limit's many names, and what rotary scaling does."""

from collections.abc import Mapping
from typing import Any

from services.worker.checkpoint.config_json import ConfigJson
from services.worker.models.decoder.rope import read_max_positions
from shared.errors import ModelError

_NAMES = (
    "max_position_embeddings", "n_positions", "max_sequence_length", "max_seq_len", "seq_length", "n_ctx",
)  # fmt: skip
_CHANGING = ("dynamic", "longrope")
"""Kinds of rotary scaling whose angles change once a sequence is longer than what the model was first made for, which
therefore is the limit here."""


def max_positions(config: Any) -> int:
    """Of a `PreTrainedConfig`. Raises ModelError if it names none."""
    text = config.get_text_config()
    named = next((value for name in _NAMES if isinstance(value := getattr(text, name, None), int)), None)
    if named is None:
        raise ModelError(f"config.json: none of {', '.join(_NAMES)} says how long a context may be")
    rope = getattr(text, "rope_parameters", None) or {}
    by_layer = rope and all(isinstance(value, dict) for value in rope.values())
    kinds = list(rope.values()) if by_layer else [rope]
    changing = [kind for kind in kinds if kind.get("rope_type") in _CHANGING]
    if changing:  # keys cached under one set of angles would be wrong under another
        return min(int(kind.get("original_max_position_embeddings") or named) for kind in changing)
    return max(_stretched(named, kind) for kind in kinds)


def _stretched(positions: int, rope: Mapping[str, Any]) -> int:
    config = ConfigJson({"max_position_embeddings": positions, "rope_parameters": dict(rope)})
    return read_max_positions(config, positions)
