"""Which architectures there are. A family's module is loaded when a model needs it; this one imports no torch."""

import importlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from services.worker.models.config_json import read_config
from services.worker.models.spec import Family
from shared.errors import ModelError

ARCHITECTURES = {
    "LlamaForCausalLM": "llama",
    "MistralForCausalLM": "mistral",
    "OPTForCausalLM": "opt",
    "Qwen2ForCausalLM": "qwen2",
    "Qwen3ForCausalLM": "qwen3",
}


def read_supported(folder: Path) -> dict[str, Any]:
    """The config.json of a model folder. Raises ModelError if it describes a kind of model that is not supported."""
    config = read_config(folder)
    if config.get("quantization_config"):
        raise ModelError(f"{folder}: quantised checkpoints are not supported (config.json has a quantization_config)")
    architecture(config)
    return config


def architecture(config: Mapping[str, Any]) -> str:
    """The supported one that a config.json names; raises ModelError naming it and those that there are."""
    names = config.get("architectures") or []
    for name in names:
        if name in ARCHITECTURES:
            return str(name)
    asked = ", ".join(map(str, names)) or f"none named, model_type {config.get('model_type')!r}"
    raise ModelError(f"config.json: architecture {asked} is not supported (supported: {', '.join(ARCHITECTURES)})")


def family(config: Mapping[str, Any]) -> Family:
    """The family of a config.json. Raises ModelError as `architecture` does."""
    module = importlib.import_module(f"services.worker.models.{ARCHITECTURES[architecture(config)]}")
    found: Family = module.FAMILY
    return found
