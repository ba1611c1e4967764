"""Quire is a server for large language models. `from quire import LLM, SamplingParams` runs one without a server.

The names are imported on use: `LLM` needs torch, which takes seconds to import, and `quire serve` does not need it.
"""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from quire.arguments import TextPrompt, TokensPrompt
    from quire.flat_logprobs import FlatLogprobs
    from quire.llm import LLM
    from quire.llm_metrics import Counter, Gauge, Histogram, Metric
    from quire.lora_request import LoRARequest
    from quire.outputs import (
        BeamSearchOutput,
        BeamSearchSequence,
        CompletionOutput,
        Logprob,
        RequestOutput,
        RequestStateStats,
    )
    from shared.beam_params import BeamSearchParams
    from shared.params import RepetitionDetectionParams, SamplingParams
    from shared.structured_outputs import StructuredOutputsParams
    from shared.vllm_params import RequestOutputKind

__all__ = [
    "LLM",
    "BeamSearchOutput",
    "BeamSearchParams",
    "BeamSearchSequence",
    "CompletionOutput",
    "Counter",
    "FlatLogprobs",
    "Gauge",
    "Histogram",
    "LoRARequest",
    "Logprob",
    "Metric",
    "RepetitionDetectionParams",
    "RequestOutput",
    "RequestOutputKind",
    "RequestStateStats",
    "SamplingParams",
    "StructuredOutputsParams",
    "TextPrompt",
    "TokensPrompt",
]

_NAMES = {
    "quire.arguments": ("TextPrompt", "TokensPrompt"),
    "quire.flat_logprobs": ("FlatLogprobs",),
    "quire.llm": ("LLM",),
    "quire.lora_request": ("LoRARequest",),
    "quire.llm_metrics": ("Counter", "Gauge", "Histogram", "Metric"),
    "quire.outputs": (
        "BeamSearchOutput",
        "BeamSearchSequence",
        "CompletionOutput",
        "Logprob",
        "RequestOutput",
        "RequestStateStats",
    ),
    "shared.beam_params": ("BeamSearchParams",),
    "shared.params": ("RepetitionDetectionParams", "SamplingParams"),
    "shared.structured_outputs": ("StructuredOutputsParams",),
    "shared.vllm_params": ("RequestOutputKind",),
}
_MODULES = {name: module for module, names in _NAMES.items() for name in names}


def __getattr__(name: str) -> Any:
    if name not in _MODULES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from importlib import import_module

    return getattr(import_module(_MODULES[name]), name)
