"""Reads rotary frequencies from config.json, in all spellings that checkpoints use.

`rope_theta` is a field of the config or of the scaling; the scaling is `rope_scaling` or `rope_parameters`, and its
type is `rope_type` or `type`. This module computes the types `default` and `factors` (a factor for each frequency), and
calls transformers' functions for the others, since those define what the names mean.

Types whose frequencies change with the length of a sequence are refused: keys that were cached under one length would
be wrong under another. "longrope" has two sets of frequencies, for short and for long sequences. The longest context
that is served decides between them, and all sequences use the same set.
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
_SUPPORTED = ("default", "factors", *_SCALED, "longrope")
_THETA = 10000.0

LARGEST_HEAD = 2**16
"""The largest head_dim. Frequencies are computed for each pair of dimensions, before any tensor is looked at."""


def read_rope(config: ConfigJson, head_dim: int, theta: float = _THETA, *, partial: bool = False) -> Rope:
    """Return the rotary positions of a model. Raise ModelError for a type that is not supported.

    `theta` is the family's default. `partial`: the family has `partial_rotary_factor`.
    """
    scaling = read_scaling(config)
    theta = scaling.number("rope_theta", config.number("rope_theta", theta))
    rotary_factor = scaling.number("partial_rotary_factor", config.number("partial_rotary_factor", 1.0))
    rotated = _rotated_dims(head_dim, rotary_factor, partial)
    rope_type = read_rope_type(scaling)
    match rope_type:
        case "default":
            return Rope(_default_frequencies(theta, rotated))
        case "factors":
            factors = _factors(scaling, "factors", rotated)
            return Rope(tuple((torch.tensor(_default_frequencies(theta, rotated)) / factors).tolist()))
        case "longrope" | "su":
            return _longrope(config, scaling, theta, rotated)
        case _ if rope_type in _SCALED:
            return _scaled(config, scaling.replace(rope_type=rope_type, rope_theta=theta), head_dim, rotary_factor)
        case _:
            raise UnsupportedByFamily(
                f"config.json: rope_type {rope_type!r} is not supported (supported: {', '.join(_SUPPORTED)})"
            )


def _rotated_dims(head_dim: int, rotary_factor: float, partial: bool) -> int:
    """Return the number of dimensions of each head that are rotated. It is even, since pairs are rotated.

    A factor is refused unless the family has it (`partial`): transformers ignores it and other engines apply it, so it
    is not known how such a checkpoint was trained.
    """
    if rotary_factor != 1 and not partial:
        raise ModelError(f"config.json: partial_rotary_factor {rotary_factor} is not supported for this architecture")
    rotated = int(min(head_dim * rotary_factor, MAX_SIZE))
    if rotated % 2 or not 2 <= rotated <= head_dim:
        raise ModelError(
            f"config.json: partial_rotary_factor {rotary_factor} of head_dim {head_dim} are {rotated} "
            f"rotated dimensions; it must be an even number from 2 to {head_dim}"
        )
    return rotated


def read_max_positions(config: ConfigJson, default: int) -> int:
    """Return the longest context: `max_position_embeddings`, or what a linear or yarn scaling extends it to."""
    positions = config.size("max_position_embeddings", default)
    scaling = read_scaling(config)
    rope_type = read_rope_type(scaling)
    if rope_type not in ("linear", "yarn"):
        return positions
    if rope_type == "yarn":
        positions = scaling.size("original_max_position_embeddings", positions)
    extended = positions * scaling.number("factor", 1.0)
    return check_size("max_position_embeddings times the rope's factor", int(min(extended, 2.0 * MAX_SIZE)))


def read_scaling(config: ConfigJson) -> ConfigJson:
    """Return the scaling under either of its names; if there are both, `rope_scaling`, as in transformers."""
    scaling = config.get("rope_scaling") or config.get("rope_parameters") or {}
    if not isinstance(scaling, dict):
        raise ModelError("config.json: rope_scaling must be an object")
    return ConfigJson(scaling)


def read_rope_type(scaling: Mapping[str, Any]) -> str:
    """Return the type of a scaling, under either of the field's names. Raise ModelError if it is no string."""
    rope_type = scaling.get("rope_type") or scaling.get("type") or "default"
    if not isinstance(rope_type, str):
        raise ModelError(f"config.json: rope_type must be a string, got {rope_type!r}")
    return rope_type


def _default_frequencies(theta: float, rotated: int) -> tuple[float, ...]:
    exponents = torch.arange(0, rotated, 2, dtype=torch.float32) / rotated
    return tuple((1.0 / theta**exponents).tolist())


def _factors(scaling: Mapping[str, Any], name: str, rotated: int) -> Tensor:
    """Return the list called `name`, with a number for each frequency."""
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
    parameters = {**scaling, **factors, "rope_type": "longrope", "rope_theta": theta}
    parameters |= {"original_max_position_embeddings": original, "partial_rotary_factor": 1.0}
    short, attention_factor = _by_transformers({"max_position_embeddings": positions}, parameters, rotated)
    long, _ = _by_transformers({"max_position_embeddings": positions}, parameters, rotated, original + 1)
    return Rope(short, attention_factor, original, long)


def _scaled(config: ConfigJson, scaling: ConfigJson, head_dim: int, rotary_factor: float) -> Rope:
    scaling.size("original_max_position_embeddings", 1)
    return Rope(*_by_transformers(config, {**scaling, "partial_rotary_factor": rotary_factor}, head_dim))


def _by_transformers(
    config: Mapping[str, Any], scaling: dict[str, Any], head_dim: int, length: int | None = None
) -> tuple[tuple[float, ...], float]:
    """Return inverse frequencies and attention factor as transformers computes them, for sequences of `length`."""
    from transformers import LlamaConfig  # takes seconds to import
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

    for name in ("factor", "attention_factor"):
        ConfigJson(scaling).number(name, 1.0)
    sizes = ("hidden_size", "num_attention_heads", "max_position_embeddings")
    try:
        llama_config = LlamaConfig(
            **{name: config[name] for name in sizes if name in config}, head_dim=head_dim, rope_parameters=scaling
        )
        compute = ROPE_INIT_FUNCTIONS[scaling["rope_type"]]
        frequencies, attention_factor = compute(llama_config, device=torch.device("cpu"), seq_len=length)
    except Exception as error:  # transformers may raise anything for a bad config
        reason = " ".join(str(error).split())
        raise ModelError(f"config.json: rope_scaling: {type(error).__name__}: {reason}") from error
    if not frequencies.isfinite().all() or not math.isfinite(attention_factor):
        raise ModelError(f"config.json: rope_scaling: these numbers give no finite frequencies: {scaling}")
    return tuple(frequencies.tolist()), float(attention_factor)
