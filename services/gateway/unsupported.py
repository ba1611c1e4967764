"""Fields of OpenAI's and vLLM's requests that are not supported here, and their values that ask for nothing.

Clients send many fields at their defaults. Such a value, or null, is taken; any other is refused, in words that tell a
field that is not supported from one that does not exist.
"""

from collections.abc import Set
from typing import Any

from shared.errors import InvalidRequest

NEUTRAL: dict[str, tuple[Any, ...]] = {
    # OpenAI's
    "audio": (),
    "function_call": ("none", "auto"),
    "functions": ([],),
    "metadata": ({},),
    "modalities": (["text"],),
    "moderation": (),
    "prediction": (),
    "prompt_cache_retention": (),
    "reasoning_effort": ("none",),
    "service_tier": ("auto", "default"),
    "store": (False,),
    "verbosity": (),
    "web_search_options": (),
    # vLLM's
    "allowed_token_ids": (),
    "bad_words": ([],),
    "cache_salt": (),
    "chat_template": (),
    "documents": ([],),
    "echo": (False,),
    "guided_choice": (),
    "guided_grammar": (),
    "guided_json": (),
    "guided_regex": (),
    "include_reasoning": (True,),
    "kv_transfer_params": (),
    "length_penalty": (1,),
    "logprob_token_ids": ([],),
    "media_io_kwargs": ({},),
    "mm_processor_kwargs": ({},),
    "prompt_embeds": (),
    "repetition_detection": (),
    "request_id": (),
    "return_prompt_text": (False,),
    "return_token_ids": (False,),
    "return_tokens_as_token_ids": (False,),
    "session_id": (),
    "spaces_between_special_tokens": (True,),
    "structured_outputs": (),
    "thinking_token_budget": (),
    "truncate_prompt_tokens": (),
    "truncation_side": (),
    "use_beam_search": (False,),
    "vllm_xargs": ({},),
}


def without_neutral(body: dict[str, Any], supported: Set[str]) -> dict[str, Any]:
    """`body` without those of the fields that it leaves at a value that asks for nothing.

    Fields in `supported` are none of them here. Raises `InvalidRequest` for other values.
    """
    foreign = [name for name in body if name in NEUTRAL and name not in supported]
    for name in foreign:
        if body[name] is not None and not any(_same(body[name], neutral) for neutral in NEUTRAL[name]):
            raise InvalidRequest(f"{name} is not supported", name)
    return {name: value for name, value in body.items() if name not in foreign}


def _same(value: Any, neutral: Any) -> bool:
    """To Python, 0 is False and 1 is True; to JSON they are not."""
    return bool(value == neutral) and isinstance(value, bool) == isinstance(neutral, bool)
