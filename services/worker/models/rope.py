"""Rotary frequencies from config.json, in all the spellings that checkpoints have.

`rope_theta` stands on top or inside; the scaling is called `rope_scaling` or `rope_parameters`, its kind `rope_type`
or `type`. The plain kind is computed here; for the others transformers' own functions are asked, which are what
checkpoints mean by these names. Kinds whose frequencies change with the length of a sequence are refused: keys that
were cached under one length would be wrong under another.
"""

from collections.abc import Mapping
from typing import Any

import torch

from services.worker.models.config_json import field
from services.worker.models.spec import Rope
from shared.errors import ModelError

_SCALED = ("linear", "llama3", "yarn")
_THETA = 10000.0


def read_rope(config: Mapping[str, Any], head_dim: int) -> Rope:
    """The rotary positions of a model; raises ModelError for a kind that is not supported."""
    scaling = _scaling(config)
    kind = _kind(scaling)
    theta = field(scaling, "rope_theta", float, field(config, "rope_theta", float, _THETA))
    if kind == "default":
        exponents = torch.arange(0, head_dim, 2, dtype=torch.float32) / head_dim
        return Rope(tuple((1.0 / theta**exponents).tolist()))
    if kind not in _SCALED:
        supported = ", ".join(("default", *_SCALED))
        raise ModelError(f"config.json: rope_type {kind!r} is not supported (supported: {supported})")
    return _scaled(config, {**scaling, "rope_type": kind, "rope_theta": theta}, head_dim)


def read_max_positions(config: Mapping[str, Any], default: int) -> int:
    """The longest context: what a linear or yarn scaling stretches it to, else `max_position_embeddings`."""
    positions = field(config, "max_position_embeddings", int, default)
    scaling = _scaling(config)
    kind = _kind(scaling)
    if kind not in ("linear", "yarn"):
        return positions
    if kind == "yarn":
        positions = field(scaling, "original_max_position_embeddings", int, positions)
    return int(positions * field(scaling, "factor", float, 1.0))


def _scaling(config: Mapping[str, Any]) -> dict[str, Any]:
    scaling = config.get("rope_parameters") or config.get("rope_scaling") or {}
    if not isinstance(scaling, dict):
        raise ModelError("config.json: rope_scaling must be an object")
    return scaling


def _kind(scaling: Mapping[str, Any]) -> str:
    kind = scaling.get("rope_type") or scaling.get("type") or "default"
    if not isinstance(kind, str):
        raise ModelError(f"config.json: rope_type must be a string, got {kind!r}")
    return kind


def _scaled(config: Mapping[str, Any], scaling: dict[str, Any], head_dim: int) -> Rope:
    from transformers import LlamaConfig  # seconds to import, and few models need it
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

    sizes = ("hidden_size", "num_attention_heads", "max_position_embeddings")
    try:
        read = LlamaConfig(
            **{name: config[name] for name in sizes if name in config}, head_dim=head_dim, rope_parameters=scaling
        )
        frequencies, magnitude = ROPE_INIT_FUNCTIONS[scaling["rope_type"]](read, device=torch.device("cpu"))
    except (KeyError, TypeError, ValueError) as error:
        raise ModelError(f"config.json: rope_scaling: {error}") from error
    return Rope(tuple(frequencies.tolist()), float(magnitude))
