"""Quire is a server for large language models. `from quire import LLM, SamplingParams` runs one without a server.

The names are imported on use: `LLM` needs torch, which takes seconds to import, and `quire serve` does not need it.
"""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from quire.llm import LLM
    from quire.outputs import CompletionOutput, Logprob, RequestOutput
    from shared.params import RepetitionDetectionParams, SamplingParams
    from shared.structured_outputs import StructuredOutputsParams

__all__ = [
    "LLM",
    "CompletionOutput",
    "Logprob",
    "RepetitionDetectionParams",
    "RequestOutput",
    "SamplingParams",
    "StructuredOutputsParams",
]

_MODULES = {
    "LLM": "quire.llm",
    "CompletionOutput": "quire.outputs",
    "Logprob": "quire.outputs",
    "RequestOutput": "quire.outputs",
    "RepetitionDetectionParams": "shared.params",
    "SamplingParams": "shared.params",
    "StructuredOutputsParams": "shared.structured_outputs",
}


def __getattr__(name: str) -> Any:
    if name not in _MODULES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from importlib import import_module

    return getattr(import_module(_MODULES[name]), name)
