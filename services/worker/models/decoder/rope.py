"""Rotary frequencies from config.json, in all the spellings that checkpoints have.

`rope_theta` stands on top or inside; the scaling is called `rope_scaling` or `rope_parameters`, its kind `rope_type`
or `type`. The plain kind, and the one that is given as a factor for each frequency, are computed here; for the others
transformers' own functions are asked, which are what checkpoints mean by these names.

Kinds whose frequencies change with the length of a sequence are refused: keys that were cached under one length would
be wrong under another. Of "longrope" there are two sets, for short and for long sequences; which one is used follows
from the longest context that is served, and is the same for all sequences.
"""

import math
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from services.worker.checkpoint.config_json import MAX_SIZE, ConfigJson, UnsupportedByFamily, check_size, convert
from services.worker.models.spec import Rope
from shared.errors import ModelError

_SCALED = ("linear", "llama3", "yarn")
_KNOWN = ("default", "factors", *_SCALED, "longrope")
_THETA = 10000.0

LARGEST_HEAD = 2**16
"""The largest head_dim: of each head's dimensions there are frequencies, made before any tensor is looked at."""


def read_rope(config: ConfigJson, head_dim: int, theta: float = _THETA, *, partial: bool = False) -> Rope:
    """The rotary positions of a model; raises ModelError for a kind that is not supported.

    `theta` is the family's, for configs that have none. `partial`: the family may rotate a part of each head only.
    """
    scaling = read_scaling(config)
    theta = scaling.number("rope_theta", config.number("rope_theta", theta))
    share = scaling.number("partial_rotary_factor", config.number("partial_rotary_factor", 1.0))
    rotated = _rotated(head_dim, share, partial)
    kind = rope_kind(scaling)
    match kind:
        case "default":
            return Rope(_plain(theta, rotated))
        case "factors":
            factors = _factors(scaling, "factors", rotated)
            return Rope(tuple((torch.tensor(_plain(theta, rotated)) / factors).tolist()))
        case "longrope" | "su":
            return _longrope(config, scaling, theta, rotated)
        case _ if kind in _SCALED:
            return _scaled(config, scaling.replace(rope_type=kind, rope_theta=theta), head_dim, share)
        case _:
            raise UnsupportedByFamily(
                f"config.json: rope_type {kind!r} is not supported (supported: {', '.join(_KNOWN)})"
            )


def _rotated(head_dim: int, share: float, partial: bool) -> int:
    """How many dimensions of each head are rotated: pairs, hence an even number.

    Where transformers' code for a family knows no such share it passes over the field, and other engines honour it:
    what such a checkpoint was trained with cannot be known.
    """
    if share != 1 and not partial:
        raise ModelError(f"config.json: partial_rotary_factor {share} is not supported for this architecture")
    rotated = int(min(head_dim * share, MAX_SIZE))
    if rotated % 2 or not 2 <= rotated <= head_dim:
        raise ModelError(
            f"config.json: partial_rotary_factor {share} of head_dim {head_dim} are {rotated} rotated dimensions; "
            f"it must be an even number from 2 to {head_dim}"
        )
    return rotated


def read_max_positions(config: ConfigJson, default: int) -> int:
    """The longest context: what a linear or yarn scaling stretches it to, else `max_position_embeddings`."""
    positions = config.size("max_position_embeddings", default)
    scaling = read_scaling(config)
    kind = rope_kind(scaling)
    if kind not in ("linear", "yarn"):
        return positions
    if kind == "yarn":
        positions = scaling.size("original_max_position_embeddings", positions)
    stretched = positions * scaling.number("factor", 1.0)
    return check_size("max_position_embeddings times the rope's factor", int(min(stretched, 2.0 * MAX_SIZE)))


def read_scaling(config: ConfigJson) -> ConfigJson:
    """Return the scaling under either of its names; where both are there, the older one, as transformers does."""
    scaling = config.get("rope_scaling") or config.get("rope_parameters") or {}
    if not isinstance(scaling, dict):
        raise ModelError("config.json: rope_scaling must be an object")
    return ConfigJson(scaling)


def rope_kind(scaling: Mapping[str, Any]) -> str:
    """Return the kind of a scaling, under either of the field's names; raise ModelError if it is no string."""
    kind = scaling.get("rope_type") or scaling.get("type") or "default"
    if not isinstance(kind, str):
        raise ModelError(f"config.json: rope_type must be a string, got {kind!r}")
    return kind


def _plain(theta: float, rotated: int) -> tuple[float, ...]:
    exponents = torch.arange(0, rotated, 2, dtype=torch.float32) / rotated
    return tuple((1.0 / theta**exponents).tolist())


def _factors(scaling: Mapping[str, Any], name: str, rotated: int) -> Tensor:
    """The list `name`, one number for each frequency."""
    if name not in scaling:
        raise ModelError(f"config.json: rope_scaling: {name} is missing")
    factors = convert(scaling[name], f"rope_scaling: {name}", list[float])
    if not all(0 < factor < math.inf for factor in factors):
        raise ModelError(f"config.json: rope_scaling: {name} must hold positive numbers")
    if len(factors) != rotated // 2:
        raise ModelError(f"config.json: rope_scaling: {name} has {len(factors)} numbers instead of {rotated // 2}")
    return torch.tensor(factors)


def _longrope(config: ConfigJson, scaling: ConfigJson, theta: float, rotated: int) -> Rope:
    positions = config.size("max_position_embeddings")
    original = scaling.size("original_max_position_embeddings", positions)
    original = config.size("original_max_position_embeddings", original)
    factors = {name: _factors(scaling, name, rotated).tolist() for name in ("short_factor", "long_factor")}
    asked = {**scaling, **factors, "rope_type": "longrope", "rope_theta": theta}
    asked |= {"original_max_position_embeddings": original, "partial_rotary_factor": 1.0}
    short, magnitude = _ask({"max_position_embeddings": positions}, asked, rotated)
    long, _ = _ask({"max_position_embeddings": positions}, asked, rotated, original + 1)
    return Rope(short, magnitude, original, long)


def _scaled(config: ConfigJson, scaling: ConfigJson, head_dim: int, share: float) -> Rope:
    scaling.size("original_max_position_embeddings", 1)
    return Rope(*_ask(config, {**scaling, "partial_rotary_factor": share}, head_dim))


def _ask(
    config: Mapping[str, Any], scaling: dict[str, Any], head_dim: int, length: int | None = None
) -> tuple[tuple[float, ...], float]:
    """Inverse frequencies and magnitude by transformers, for sequences of `length`."""
    from transformers import LlamaConfig  # seconds to import, and few models need it
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

    for name in ("factor", "attention_factor"):
        ConfigJson(scaling).number(name, 1.0)
    sizes = ("hidden_size", "num_attention_heads", "max_position_embeddings")
    try:
        read = LlamaConfig(
            **{name: config[name] for name in sizes if name in config}, head_dim=head_dim, rope_parameters=scaling
        )
        compute = ROPE_INIT_FUNCTIONS[scaling["rope_type"]]
        frequencies, magnitude = compute(read, device=torch.device("cpu"), seq_len=length)
    except Exception as error:  # it checks configs in its own ways, and computes with whatever passes
        reason = " ".join(str(error).split())
        raise ModelError(f"config.json: rope_scaling: {type(error).__name__}: {reason}") from error
    if not frequencies.isfinite().all() or not math.isfinite(magnitude):
        raise ModelError(f"config.json: rope_scaling: these numbers give no finite frequencies: {scaling}")
    return tuple(frequencies.tolist()), float(magnitude)
