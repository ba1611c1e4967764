"""The engine in this process: its flags, and the `LLM` made of them.

Flags are those settings of the server that `quire.LLM` has as arguments, with the same names, bounds and defaults.
"""

import inspect
from collections.abc import Mapping
from typing import Any

import msgspec
from msgspec import Struct

from quire.llm import LLM
from services.scheduler.config import SchedulerConfig
from services.worker.config import WorkerConfig
from shared.config import knobs
from shared.hub.embedded import EMBEDDED
from shared.params import SamplingParams


def engine_config() -> type[Struct]:
    """One struct of the settings, for the flag parser."""
    known = inspect.signature(LLM).parameters
    found = {knob.name: knob for config in (WorkerConfig, SchedulerConfig) for knob in knobs(config)}
    fields = [(knob.name, knob.type, knob.default) for knob in found.values() if knob.name in known]
    return msgspec.defstruct("EngineOptions", fields, kw_only=True)


def engine_settings(flags: Mapping[str, Any]) -> dict[str, Any]:
    """Arguments of `LLM` out of parsed flags, those given."""
    return {knob.name: flags[knob.name] for knob in knobs(engine_config()) if knob.name in flags}


def model_id(settings: Mapping[str, Any]) -> str:
    """The model's name in results."""
    return str(settings.get("model") or EMBEDDED)


def sampling(output_len: int, n: int) -> SamplingParams:
    """As `vllm bench` samples offline: from the plain distribution, to exactly this length."""
    return SamplingParams(n=n, temperature=1.0, top_p=1.0, ignore_eos=True, max_tokens=output_len)
