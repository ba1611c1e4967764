"""Makes the engine's flags for `quire bench throughput` and `latency`, which run `quire.LLM`.

They are the settings of the server that are also arguments of `quire.LLM`, with the same names, bounds and defaults.
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
    """Return a struct of the settings, for the flag parser."""
    arguments = inspect.signature(LLM).parameters
    by_name = {knob.name: knob for config in (WorkerConfig, SchedulerConfig) for knob in knobs(config)}
    fields = [(knob.name, knob.type, knob.default) for knob in by_name.values() if knob.name in arguments]
    return msgspec.defstruct("EngineOptions", fields, kw_only=True)


def engine_settings(flags: Mapping[str, Any]) -> dict[str, Any]:
    """Return the arguments of `LLM` that the parsed flags set."""
    return {knob.name: flags[knob.name] for knob in knobs(engine_config()) if knob.name in flags}


def model_id(settings: Mapping[str, Any]) -> str:
    """Return the name of the model in a result."""
    return str(settings.get("model") or EMBEDDED)


def sampling(output_len: int, n: int) -> SamplingParams:
    """Return the parameters that `vllm bench` uses: the model's own distribution, exactly `output_len` tokens."""
    return SamplingParams(n=n, temperature=1.0, top_p=1.0, ignore_eos=True, max_tokens=output_len)
