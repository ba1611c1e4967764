"""Mistral: a Llama whose layers, or some of them, may see a window of the context."""

from collections.abc import Mapping
from typing import Any

from services.worker.checkpoint.config_json import nullable
from services.worker.models.decoder.windows import sliding, with_windows
from services.worker.models.families import llama
from services.worker.models.spec import DecoderSpec, Family


def read(config: Mapping[str, Any]) -> DecoderSpec:
    """The spec of a MistralForCausalLM."""
    spec = llama.read_as("MistralForCausalLM", config, max_positions=131072, biased=False)
    window = nullable(config, "sliding_window", int, 4096)
    return with_windows(spec, window, sliding(config, [window is not None] * spec.num_layers))


FAMILY = Family(read, llama.NAMES)
