"""Which architectures there are. A family's module is loaded when a model needs it; none of them imports torch."""

import importlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from services.worker.models.config_json import read_config
from services.worker.models.spec import DecoderSpec, Family
from shared.errors import ModelError

ARCHITECTURES = {
    "LlamaForCausalLM": "llama",
    "OPTForCausalLM": "opt",
}


def family(config: Mapping[str, Any]) -> Family:
    """The family of a config.json; raises ModelError naming its architecture and those that are supported."""
    names = config.get("architectures") or []
    for name in names:
        if name in ARCHITECTURES:
            module = importlib.import_module(f"services.worker.models.{ARCHITECTURES[name]}")
            found: Family = module.FAMILY
            return found
    asked = ", ".join(map(str, names)) or f"none named, model_type {config.get('model_type')!r}"
    raise ModelError(f"config.json: architecture {asked} is not supported (supported: {', '.join(ARCHITECTURES)})")


def read_folder(folder: Path) -> tuple[Family, DecoderSpec]:
    """What a model folder's config.json describes. Raises ModelError for whatever is not supported."""
    config = read_config(folder)
    if config.get("quantization_config"):
        raise ModelError(f"{folder}: quantised checkpoints are not supported (config.json has a quantization_config)")
    found = family(config)
    return found, found.spec(config)
