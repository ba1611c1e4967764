"""Which architectures there are. A family's module is loaded when a model needs it."""

import importlib
from collections.abc import Mapping
from typing import Any

from services.worker.models.spec import Family
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
