"""Which architectures there are, and which way each is served. A family's module is loaded when a model needs it.

An architecture with a family runs through our decoder; another one through transformers' own modelling code, if that
can be given our attention. So does a checkpoint that asks for something its family lacks (`decide` in ../decision.py).
This module imports no torch, so that the command line can ask it before anything starts.
"""

import importlib
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

from services.worker.checkpoint.config_json import UnsupportedByFamily, convert, read_config
from services.worker.checkpoint.quantization_config import (
    SETTINGS_FILES,
    SUPPORTED,
    packed_format,
    with_settings_beside,
)
from services.worker.models.fallback.catalog import causal_by_type, causal_models, with_replaceable_attention
from shared.errors import ModelError

if TYPE_CHECKING:
    from services.worker.models.spec import Family

ARCHITECTURES = {
    "GPT2LMHeadModel": "gpt2",
    "Gemma2ForCausalLM": "gemma2",
    "Gemma3ForCausalLM": "gemma3",
    "Gemma3ForConditionalGeneration": "gemma3",
    "GemmaForCausalLM": "gemma",
    "LlamaForCausalLM": "llama",
    "MistralForCausalLM": "mistral",
    "MixtralForCausalLM": "mixtral",
    "OPTForCausalLM": "opt",
    "Phi3ForCausalLM": "phi3",
    "Qwen2ForCausalLM": "qwen2",
    "Qwen3ForCausalLM": "qwen3",
    "Qwen3MoeForCausalLM": "qwen3_moe",
}

Implementation = Literal["auto", "quire", "transformers"]

_QUANTISED_FILES = ("hf_quant_config.json", *SETTINGS_FILES)
"""What tools write beside config.json, some of them instead of a field in it."""

LISTED = "`quire models` lists what is served"


class Way(NamedTuple):
    """How a model is served: its architecture's name, and whether by a family of ours."""

    architecture: str
    native: bool
    reason: str = ""  # why not by the family that there is


def read_supported(folder: Path, implementation: Implementation = "auto") -> dict[str, Any]:
    """Return the config.json of a model folder, with the settings of quantised weights that stand in a file beside it.

    Raises ModelError if it describes a kind of model that is not supported.
    """
    config = read_config(folder)
    try:
        config = with_settings_beside(config, folder)
        if packed_format(config) is None and (sign := _quantised(folder, config)):
            raise ModelError(f"{sign}, which is not supported (of quantised checkpoints these are: {SUPPORTED})")
        choose(config, implementation)
    except ModelError as error:
        raise ModelError(f"{folder}: {error}") from error
    return config


def choose(config: Mapping[str, Any], implementation: Implementation = "auto") -> Way:
    """Return the way of the model that a config.json describes, by its names alone.

    Raises ModelError naming its architecture if there is none.
    """
    names = _architectures(config)
    native = next((name for name in names if name in ARCHITECTURES), None)
    if native and implementation != "transformers":
        return Way(native, True)
    if implementation == "quire":
        supported = ", ".join(ARCHITECTURES)
        raise ModelError(f"--model-impl quire: no family of architecture {', '.join(names)} (there are: {supported})")
    theirs = next((name for name in names if name in with_replaceable_attention()), None)
    if theirs:
        return Way(theirs, False)
    raise ModelError(f"architecture {', '.join(names)} {_reason(names, config)}; {LISTED}")


def fall_back(way: Way, implementation: Implementation, error: UnsupportedByFamily) -> Way:
    """Return transformers' way of a model that its family cannot serve because of `error`, which is raised if there is
    none, or if the family was asked for."""
    if implementation != "auto" or way.architecture not in with_replaceable_attention():
        raise error
    return Way(way.architecture, False, str(error))


def _architectures(config: Mapping[str, Any]) -> list[str]:
    """The names of the model's class. Where there is none that says it, transformers goes by `model_type`."""
    value = config.get("architectures") or []
    names = [value] if isinstance(value, str) else convert(value, "architectures", list[str])
    if names and (config.get("auto_map") or not all(map(_is_body_or_unknown, names))):
        return names
    kind = config.get("model_type")
    if by_type := causal_by_type().get(str(kind)):
        return [by_type]
    if not names:
        raise ModelError(f"config.json: no architectures named, and model_type {kind!r} is no causal language model's")
    return names


def _is_body_or_unknown(name: str) -> bool:
    """Return whether `name` is of a causal model's body, or another spelling of a causal model's class."""
    return name not in ARCHITECTURES and name not in causal_models() and name.endswith(("Model", "ForCausalLM"))


def family(architecture: str) -> "Family":
    """The family of an architecture that is in the table."""
    module = importlib.import_module(f"services.worker.models.families.{ARCHITECTURES[architecture]}")
    found: Family = module.FAMILY
    return found


def _quantised(folder: Path, config: Mapping[str, Any]) -> str | None:
    """Return what says that the weights are quantised although nothing says how, or None."""
    if config.get("compression_config"):
        return "config.json has a compression_config"
    there = next((name for name in _QUANTISED_FILES if (folder / name).exists()), None)
    return f"there is a {there}, but no quantization_config in config.json" if there else None


def _reason(names: list[str], config: Mapping[str, Any]) -> str:
    if causal_models().intersection(names):
        return "is not supported: in transformers' code for it attention cannot be replaced, or is not all of its state"
    if config.get("auto_map"):
        return "needs code that comes with the checkpoint (auto_map), which is never run"
    if config.get("is_encoder_decoder"):
        return "is not supported: it is an encoder with a decoder"
    return "is not supported"
