"""Mistral: a Llama whose layers may see a window of the context."""

from collections.abc import Mapping
from typing import Any

from services.worker.models import llama
from services.worker.models.config_json import nullable
from services.worker.models.spec import DecoderSpec, Family
from services.worker.models.windows import with_window


def read(config: Mapping[str, Any]) -> DecoderSpec:
    """The spec of a MistralForCausalLM."""
    spec = llama.read_as("MistralForCausalLM", config, max_positions=131072, biased=False)
    return with_window(spec, nullable(config, "sliding_window", int, 4096))


FAMILY = Family(read, llama.NAMES)
