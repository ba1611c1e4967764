"""Fields of other servers' requests that are not supported here, by what they ask for.

A hint asks for nothing that would change the text: it is taken, whatever its value. Any other field that would change
the answer is taken at a value that asks for nothing, or null, since clients send many fields at their defaults; other
values are refused. A field that is in no table is unknown.
"""

from collections.abc import Container, Mapping
from typing import Any

import msgspec

from shared.errors import InvalidRequest

HINTS = frozenset(
    {
        # OpenAI's: labels, accounting, and wishes about how the service works
        "metadata", "moderation", "parallel_tool_calls", "prediction", "prompt_cache_key", "prompt_cache_options",
        "prompt_cache_retention", "reasoning_effort", "safety_identifier", "service_tier", "store", "user",
        "verbosity", "web_search_options",
        # vLLM's: labels, and what is about reasoning, truncation or chunks alone
        "include_reasoning", "request_id", "session_id", "stream_interval", "truncation_side",
    }
)  # fmt: skip
"""There are no tools, no reasoning and no searches here for which some of them would matter."""

STREAM_HINTS = frozenset({"include_obfuscation"})

NEUTRAL: dict[str, tuple[Any, ...]] = {
    # OpenAI's
    "audio": (),
    "best_of": (1,),
    "function_call": ("none", "auto"),
    "functions": ([],),
    "modalities": (["text"],),
    "suffix": ("",),
    "tool_choice": ("none", "auto"),
    "tools": ([],),
    # vLLM's
    "allowed_token_ids": (),
    "bad_words": ([],),
    "cache_salt": (),
    "chat_template": (),
    "documents": ([],),
    "ec_transfer_params": ({},),
    "echo": (False,),
    "guided_choice": (),
    "guided_grammar": (),
    "guided_json": (),
    "guided_regex": (),
    "kv_transfer_params": ({},),
    "length_penalty": (1,),
    "logits_processors": ([],),
    "logprob_token_ids": ([],),
    "media_io_kwargs": ({},),
    "mm_payload": (),
    "mm_processor_kwargs": ({},),
    "prompt_embeds": (),
    "repetition_detection": (),
    "return_prompt_text": (False,),
    "return_token_ids": (False,),
    "return_token_offsets": (False,),
    "return_tokens_as_token_ids": (False,),
    "routed_experts_prompt_start": (),
    "spaces_between_special_tokens": (True,),
    "structured_outputs": (),
    "thinking_token_budget": (-1,),
    "truncate_prompt_tokens": (),
    "use_beam_search": (False,),
    "vllm_xargs": ({},),
    "watermarking": (),
}


def unknown(given: Mapping[str, msgspec.Raw], supported: Container[str]) -> list[str]:
    """Return the names of fields that this server does not know; those in `supported` it does.

    Raises `InvalidRequest` for a field that would change the answer and is not supported.
    """
    foreign = [name for name in given if name not in supported and name not in HINTS]
    for name in foreign:
        if name in NEUTRAL and not _asks_for_nothing(msgspec.json.decode(given[name]), NEUTRAL[name]):
            raise InvalidRequest(f"{name} is not supported", name)
    return [name for name in foreign if name not in NEUTRAL]


def _asks_for_nothing(value: Any, neutral: tuple[Any, ...]) -> bool:
    return value is None or any(_same(value, one) for one in neutral)


def _same(value: Any, neutral: Any) -> bool:
    """Return whether two values of JSON are equal; to Python, 0 is False and 1 is True."""
    return bool(value == neutral) and isinstance(value, bool) == isinstance(neutral, bool)
