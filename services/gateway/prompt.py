"""From a request's prompt or messages to token ids, checked against the vocabulary.

Long texts are tokenized in a thread, so that they do not stop the other streams of this gateway; the library lets go of
the interpreter meanwhile.
"""

import asyncio
from array import array
from collections.abc import Sequence
from typing import Any

from msgspec import Struct

from services.gateway.openai import ChatRequest, CompletionRequest
from shared.errors import InvalidRequest
from shared.text.template import ChatTemplate
from shared.text.tokenizer import Tokenizer

MAX_PROMPTS = 1024
LONG = 20_000  # characters; about ten milliseconds of tokenizing


class Prompt(Struct, frozen=True):
    """What the model is to go on with."""

    tokens: "array[int]"
    text: str | None = None  # as it was given, if it was text


async def completion_prompts(request: CompletionRequest, tokenizer: Tokenizer, vocab_size: int) -> list[Prompt]:
    """One prompt for each text or list of ids in the request. Raises `InvalidRequest` naming `prompt`."""
    add_special_tokens = request.add_special_tokens is not False
    return [
        _from_ids(given, vocab_size)
        if not isinstance(given, str)
        else await _from_text(given, tokenizer, add_special_tokens, "prompt")
        for given in _split(request.prompt)
    ]


async def chat_prompt(request: ChatRequest, tokenizer: Tokenizer, template: ChatTemplate) -> Prompt:
    """The messages as the template puts them. It prints BOS itself, so none is added unless the request says so."""
    text = render(request, template)
    return await _from_text(text, tokenizer, request.add_special_tokens is True, "messages")


def render(request: ChatRequest, template: ChatTemplate) -> str:
    """The text of a chat's prompt. Raises `InvalidRequest`, with the template's own words if it raised."""
    variables = dict(request.chat_template_kwargs or {})
    for name in ("messages", "add_generation_prompt", "continue_final_message"):
        if name in variables:
            raise InvalidRequest(f"chat_template_kwargs must not hold {name}", "chat_template_kwargs")
    return template.render(
        request.messages,
        add_generation_prompt=request.add_generation_prompt is not False,
        continue_final_message=request.continue_final_message is True,
        **variables,
    )


def _split(prompt: str | list[str | int | list[int]]) -> Sequence[str | list[int]]:
    """The prompts one by one, from any of the four ways to write them."""
    if isinstance(prompt, str):
        return [prompt]
    if not prompt:
        raise InvalidRequest("prompt must not be empty", "prompt")
    if len(kinds := {type(part) for part in prompt}) > 1:
        names = " and ".join(sorted(kind.__name__ for kind in kinds))
        raise InvalidRequest(f"prompt must hold only texts, only ids or only lists of ids, got {names}", "prompt")
    parts: list[Any] = prompt
    if isinstance(parts[0], int):
        return [parts]
    if len(parts) > MAX_PROMPTS:
        raise InvalidRequest(f"prompt must hold at most {MAX_PROMPTS} prompts, got {len(parts)}", "prompt")
    return parts


async def _from_text(text: str, tokenizer: Tokenizer, add_special_tokens: bool, param: str) -> Prompt:
    if len(text) > LONG:
        ids = await asyncio.to_thread(tokenizer.encode, text, add_special_tokens)
    else:
        ids = tokenizer.encode(text, add_special_tokens)
    if not ids:
        raise InvalidRequest(f"{param} must not be empty: it has no tokens", param)
    return Prompt(array("i", ids), text)


def _from_ids(ids: list[int], vocab_size: int) -> Prompt:
    if not ids:
        raise InvalidRequest("prompt must not be empty: it has no tokens", "prompt")
    if min(ids) < 0 or max(ids) >= vocab_size:
        wrong = next(id for id in ids if not 0 <= id < vocab_size)
        raise InvalidRequest(
            f"prompt holds {wrong}, which is no token id: they go from 0 to {vocab_size - 1}", "prompt"
        )
    return Prompt(array("i", ids))
