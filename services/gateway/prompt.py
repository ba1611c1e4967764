"""From a request's prompt or messages to token ids, checked against the vocabulary and the context.

One loop serves all streams of this gateway, so whatever may take long is done off it: the tokenizer lets go of the
interpreter meanwhile, all else shares one thread (offload.py). What cannot fit is refused before that, by its number
of characters, ids or messages.
"""

import asyncio
from array import array
from collections.abc import Iterator, Sequence
from typing import Any

from msgspec import Struct

from services.gateway.bounds import MAX_SAMPLES
from services.gateway.offload import off_loop_if
from services.gateway.openai import ChatRequest, CompletionRequest
from shared.errors import InvalidRequest, brief
from shared.text.template import ChatTemplate
from shared.text.tokenizer import Tokenizer

LONG = 20_000  # characters or ids; about ten milliseconds of tokenizing
MANY = 64  # messages; about a millisecond of rendering
GROUP = 1_000_000  # characters that are tokenized at once; what the library makes of them is some hundred megabytes


class Prompt(Struct, frozen=True):
    """What the model is to go on with."""

    tokens: "array[int]"
    text: str | None = None  # as it was given, if it was text
    offsets: "array[int] | None" = None  # where in that text each token begins, if that is needed


async def completion_prompts(
    request: CompletionRequest, tokenizer: Tokenizer, *, max_model_len: int, vocab_size: int
) -> list[Prompt]:
    """One prompt for each text or list of ids in the request. Raises `InvalidRequest` naming `prompt`."""
    given = _split(request.prompt, max_model_len)
    texts = [part for part in given if isinstance(part, str)]
    if texts:
        special = request.add_special_tokens is not False
        offsets = request.echo is True and request.logprobs is not None
        return await _from_texts(texts, tokenizer, special, max_model_len, "prompt", offsets)
    ids = [part for part in given if not isinstance(part, str)]
    return await off_loop_if(sum(map(len, ids)) > LONG, _from_all_ids, ids, max_model_len, vocab_size)


async def chat_prompt(
    request: ChatRequest, tokenizer: Tokenizer, template: ChatTemplate, *, max_model_len: int
) -> Prompt:
    """The messages as the template puts them. It prints BOS itself, so none is added unless the request says so."""
    if len(request.messages) > max_model_len:  # however little a message is, its role is a token or more
        raise InvalidRequest(
            f"the context of this model is {max_model_len} tokens, but there are {len(request.messages)} messages",
            "messages",
        )
    text = await off_loop_if(not _is_short(request), render, request, template)
    (prompt,) = await _from_texts([text], tokenizer, request.add_special_tokens is True, max_model_len, "messages")
    return prompt


def render(request: ChatRequest, template: ChatTemplate) -> str:
    """The text of a chat's prompt. Raises `InvalidRequest`, with the template's own words if it raised."""
    return template.render(
        request.messages,
        add_generation_prompt=request.add_generation_prompt is not False,
        continue_final_message=request.continue_final_message is True,
        variables=request.chat_template_kwargs,
    )


def _split(prompt: str | list[str | int | list[int]], max_model_len: int) -> Sequence[str | list[int]]:
    """Return the prompts one by one, from any of the four ways to write them. Their number is checked first."""
    if isinstance(prompt, str):
        return [prompt]
    if not prompt:
        raise InvalidRequest("prompt must not be empty", "prompt")
    single = isinstance(prompt[0], int)
    if single:
        _check_length(len(prompt), max_model_len, "prompt")
    elif len(prompt) > MAX_SAMPLES:
        raise InvalidRequest(f"prompt must hold at most {MAX_SAMPLES} prompts, got {len(prompt)}", "prompt")
    if len(kinds := {type(part) for part in prompt}) > 1:
        names = " and ".join(sorted(kind.__name__ for kind in kinds))
        raise InvalidRequest(f"prompt must hold only texts, only ids or only lists of ids, got {names}", "prompt")
    parts: list[Any] = prompt
    return [parts] if single else parts


def _is_short(request: ChatRequest) -> bool:
    """Whether the template surely is quick: few messages, with nothing but short texts."""
    if len(request.messages) > MANY or request.chat_template_kwargs:
        return False
    parts = [part for message in request.messages for part in message.values()]
    return all(isinstance(part, str) for part in parts) and sum(map(len, parts)) <= LONG


async def _from_texts(
    texts: list[str],
    tokenizer: Tokenizer,
    add_special_tokens: bool,
    max_model_len: int,
    param: str,
    offsets: bool = False,
) -> list[Prompt]:
    most = tokenizer.max_characters(max_model_len)
    for text in texts:
        if len(text) > most:
            raise InvalidRequest(
                f"the context of this model is {max_model_len} tokens, so at most {most} characters, "
                f"but {param} has {len(text)}",
                param,
            )
    if sum(map(len, texts)) <= LONG:
        return _tokenize(texts, tokenizer, add_special_tokens, max_model_len, param, offsets)
    return await asyncio.to_thread(_tokenize, texts, tokenizer, add_special_tokens, max_model_len, param, offsets)


def _tokenize(
    texts: list[str], tokenizer: Tokenizer, add_special_tokens: bool, max_model_len: int, param: str, offsets: bool
) -> list[Prompt]:
    prompts: list[Prompt] = []
    for group in _groups(texts):
        for text, ids in zip(group, tokenizer.encode_all(group, add_special_tokens), strict=True):
            _check_length(len(ids), max_model_len, param)
            places = array("i", tokenizer.token_offsets(text, add_special_tokens)) if offsets else None
            prompts.append(Prompt(array("i", ids), text, places))
    return prompts


def _groups(texts: list[str]) -> Iterator[list[str]]:
    """The texts in order, as many at a time as have `GROUP` characters together, or one that is longer."""
    group: list[str] = []
    length = 0
    for text in texts:
        if group and length + len(text) > GROUP:
            yield group
            group, length = [], 0
        group.append(text)
        length += len(text)
    yield group


def _check_length(count: int, max_model_len: int, param: str) -> None:
    """For what is no prompt whatever else is asked; how much room the output needs is checked with the parameters."""
    if not count:
        raise InvalidRequest(f"{param} must not be empty: it has no tokens", param)
    if count > max_model_len:
        raise InvalidRequest(f"the context of this model is {max_model_len} tokens, but {param} has {count}", param)


def _from_all_ids(prompts: list[list[int]], max_model_len: int, vocab_size: int) -> list[Prompt]:
    return [_from_ids(ids, max_model_len, vocab_size) for ids in prompts]


def _from_ids(ids: list[int], max_model_len: int, vocab_size: int) -> Prompt:
    _check_length(len(ids), max_model_len, "prompt")
    if min(ids) < 0 or max(ids) >= vocab_size:
        wrong = next(id for id in ids if not 0 <= id < vocab_size)
        raise InvalidRequest(
            f"prompt holds {brief(wrong)}, which is out of vocabulary: its ids go from 0 to {vocab_size - 1}", "prompt"
        )
    return Prompt(array("i", ids))
