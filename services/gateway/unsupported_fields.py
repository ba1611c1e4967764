"""Lists the fields of OpenAI's and vLLM's requests that are not supported here.

A hint cannot change the text, so it is accepted with any value. Any other field is accepted with null, or with a
neutral value, with which it has no effect, since many clients send all fields with their defaults. Other values are
refused. A field that is in neither table is unknown.
"""

from collections.abc import Container, Mapping
from typing import Any

import msgspec

from shared.errors import InvalidRequest
from shared.vllm_params import REFUSED, asks_for_nothing

HINTS = frozenset(
    {
        # OpenAI's: labels, accounting, and preferences about the service
        "metadata", "moderation", "prediction", "prompt_cache_key", "prompt_cache_options", "prompt_cache_retention",
        "safety_identifier", "service_tier", "store", "user", "verbosity", "web_search_options",
        # vLLM's: labels
        "session_id",
    }
)  # fmt: skip
"""Fields that are accepted with any value. Some are about searches, which do not exist here."""

STREAM_HINTS = frozenset({"include_obfuscation"})
"""Hints among the stream_options."""

NEUTRAL_VALUES: dict[str, tuple[Any, ...]] = {
    # OpenAI's
    "audio": (),
    "function_call": ("none", "auto"),
    "functions": (),
    "modalities": (["text"],),
    "suffix": (),
    "tool_choice": ("none", "auto"),
    "tools": (),
    # vLLM's
    "chat_template": (),
    "documents": (),
    "ec_transfer_params": (),
    "kv_transfer_params": (),
    "media_io_kwargs": (),
    "mm_payload": (),
    "mm_processor_kwargs": (),
    "prompt_embeds": (),
    "return_prompt_text": (False,),
    "return_token_offsets": (False,),
    "vllm_xargs": (),
    # of which vLLM's `SamplingParams` has the same
    **{
        name: REFUSED[name][0]
        for name in (
            "logits_processors", "routed_experts_prompt_start", "watermarking",
        )
    },
}  # fmt: skip
"""The values, besides null and what is empty, with which a field is accepted."""


def unknown_fields(fields: Mapping[str, msgspec.Raw], supported: Container[str]) -> list[str]:
    """Return the names of fields that are unknown: neither in `supported` nor in a table here.

    Raise `InvalidRequest` for a field that would change the answer and is not supported.
    """
    foreign = [name for name in fields if name not in supported and name not in HINTS]
    for name in foreign:
        if name in NEUTRAL_VALUES and not asks_for_nothing(msgspec.json.decode(fields[name]), NEUTRAL_VALUES[name]):
            reason = f": {REFUSED[name][1]}" if name in REFUSED else ""
            raise InvalidRequest(f"{name} is not supported{reason}", name)
    return [name for name in foreign if name not in NEUTRAL_VALUES]
