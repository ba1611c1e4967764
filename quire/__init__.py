"""Quire, a server for large language models; `from quire import LLM, SamplingParams` to use one without a server.

The names are loaded on use, since `LLM` needs torch, which takes seconds to import and which `quire serve` never does.
"""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from quire.llm import LLM
    from quire.outputs import CompletionOutput, Logprob, RequestOutput
    from shared.params import SamplingParams

__all__ = ["LLM", "CompletionOutput", "Logprob", "RequestOutput", "SamplingParams"]

_HOMES = {
    "LLM": "quire.llm",
    "CompletionOutput": "quire.outputs",
    "Logprob": "quire.outputs",
    "RequestOutput": "quire.outputs",
    "SamplingParams": "shared.params",
}


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from importlib import import_module

    return getattr(import_module(_HOMES[name]), name)
