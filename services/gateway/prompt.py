"""Turns a request's prompt or messages into token ids, checked against the vocabulary and the context.

One loop serves all streams of this gateway, so long work runs in a thread. Tokenizing releases the interpreter, and
may use any thread; all other work shares one (`threads.py`). A prompt that cannot fit is refused first, by its number
of characters, ids or messages.
"""

import asyncio
from array import array
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from msgspec import Struct

from services.gateway.api_requests import ChatRequest, CompletionRequest, GenerationRequest
from services.gateway.bounds import MAX_SAMPLES, MAX_TOKENS
from services.gateway.request_template import render_request_template
from services.gateway.threads import run_in_thread_if
from shared.beam_params import BeamSettings
from shared.errors import InvalidRequest, brief, context_exceeded
from shared.params import SamplingParams
from shared.protocol import Sampling
from shared.text.bad_words import tokenize_bad_words
from shared.text.message_parser import MessageFormat
from shared.text.template import ChatTemplate
from shared.text.tokenizer import Tokenizer
from shared.text.truncation import Truncation

LONG_TEXT = 20_000  # characters or ids; tokenizing them takes about ten milliseconds
MANY_MESSAGES = 64  # rendering them takes about a millisecond
PIECE = 100_000  # ids that one call of Python looks at, which takes 4 ms and keeps the interpreter for that time
MAX_BATCH = 1_000_000  # characters tokenized in one call, whose result takes several hundred megabytes


class TokenizedPrompt(Struct, frozen=True):
    """A prompt as token ids."""

    tokens: "array[int]"
    text: str | None = None  # None if the request has token ids; without the part that was dropped
    offsets: "array[int] | None" = None  # character of the text at which each token begins, if needed


class PreparedPrompt(Struct, frozen=True):
    """A prompt with its sampling, checked against the model's limits and ready to be submitted."""

    tokens: "array[int]"
    params: SamplingParams
    sampling: Sampling
    priority: int
    arrived: float  # on the monotonic clock
    request_id: str = ""  # that the client sees, with the prompt's index if there are several
    samples_before: int = 0  # samples of the same request in earlier prompts
    echo: str | None = None  # text that is shown before the output
    offsets: "array[int] | None" = None  # character of the prompt's text at which each token begins, if needed
    format: MessageFormat | None = None  # of the output's text; None: all of it is content
    cache_salt: str = ""
    beams: BeamSettings | None = None  # of a beam search, whose n best beams are the samples; None: it is none
    text: str | None = None  # that the answer has in a field of its own
    adapter: str = ""  # name of the adapter that it uses; empty: none
    lacks_template: bool = False  # the model has a chat template, by which a completion's prompt was not made


def truncation_of(
    request: GenerationRequest, params: SamplingParams, default_max_tokens: int | None, max_model_len: int
) -> Truncation | None:
    """Return what a request asks for; None: its prompt is kept whole. Raise `InvalidRequest`."""
    return Truncation.of(
        request.truncate_prompt_tokens,
        request.truncation_side,
        max_tokens=params.max_tokens,
        max_model_len=max_model_len,
        default_max_tokens=default_max_tokens,
    )


class Tokenizing(Struct, frozen=True):
    """How the texts of one request become prompts. `field` is the one that has them."""

    tokenizer: Tokenizer
    add_special_tokens: bool
    max_model_len: int
    field: str
    truncation: Truncation | None = None
    must_fit: bool = True  # otherwise a prompt may be empty, or have more tokens than the context
    with_offsets: bool = False

    def check_characters(self, texts: Sequence[str]) -> None:
        """Raise `InvalidRequest` for a text that certainly exceeds the context."""
        limit = self.tokenizer.max_characters(self.max_model_len)
        for text in texts:
            if len(text) > limit:
                found = f"{self.field} has {len(text)} characters, of which at most {limit} can fit"
                raise context_exceeded(self.max_model_len, found, self.field)

    def prompts(self, texts: list[str]) -> list[TokenizedPrompt]:
        """Return one prompt for each text. Raise `InvalidRequest` for one without tokens, or with too many."""
        try:
            if self.truncation is not None:
                return [self._part(text, self.truncation) for text in texts]
            return [
                self._prompt(text, ids)
                for batch in _batches(texts)
                for text, ids in zip(batch, self.tokenizer.encode_all(batch, self.add_special_tokens), strict=True)
            ]
        except InvalidRequest as error:
            raise InvalidRequest(error.message, error.param or self.field) from error

    def _part(self, text: str, truncation: Truncation) -> TokenizedPrompt:
        """Return the part of a text that is kept. Its own text is that of its tokens, as if they had been given."""
        ids, was_cut = self.tokenizer.encode_part(
            text,
            truncation.max_tokens,
            keep_start=truncation.keep_start,
            add_special_tokens=self.add_special_tokens,
        )
        if not was_cut:
            return self._prompt(text, ids)
        return TokenizedPrompt(_as_array(ids), text_of(ids, self.tokenizer))

    def _prompt(self, text: str, ids: list[int]) -> TokenizedPrompt:
        if self.must_fit:
            _check_length(len(ids), self.max_model_len, self.field)
        else:
            _check_listed(len(ids), self.field)
        offsets = None
        if self.with_offsets:
            offsets = array("i", self.tokenizer.token_offsets(text, self.add_special_tokens))
        return TokenizedPrompt(_as_array(ids), str(text), offsets)  # cuts have had their effect


async def completion_prompts(
    request: CompletionRequest,
    tokenizer: Tokenizer,
    *,
    max_model_len: int,
    vocab_size: int,
    truncation: Truncation | None = None,
    must_fit: bool = True,
) -> list[TokenizedPrompt]:
    """Return one prompt for each text or list of ids in the request. Raise `InvalidRequest` naming `prompt`.

    Unless they `must_fit`, texts may be empty, or have more tokens than the context.
    """
    parts = _split(request.prompt, max_model_len, truncation)
    texts = [part for part in parts if isinstance(part, str)]
    if texts:
        add_special_tokens = request.add_special_tokens is not False
        with_offsets = request.echo is True and request.logprobs is not None
        tokenizing = Tokenizing(
            tokenizer,
            add_special_tokens,
            max_model_len,
            field="prompt",
            truncation=truncation,
            must_fit=must_fit,
            with_offsets=with_offsets,
        )
        return await _from_texts(texts, tokenizing)
    ids = [part if truncation is None else truncation.cut(part) for part in parts if not isinstance(part, str)]
    shown_by = tokenizer if request.echo else None
    is_long = sum(map(len, ids)) > LONG_TEXT
    return await run_in_thread_if(is_long, _from_all_ids, ids, max_model_len, vocab_size, shown_by)


async def chat_prompt(
    request: ChatRequest,
    tokenizer: Tokenizer,
    template: ChatTemplate,
    *,
    variables: Mapping[str, Any],
    max_model_len: int,
    truncation: Truncation | None = None,
    must_fit: bool = True,
) -> TokenizedPrompt:
    """Return the messages as rendered by the template, or by that of the request. The template gets `variables`.

    It writes BOS, so none is added unless requested. Unless it `must_fit`, the prompt may have more tokens than the
    context.
    """
    if len(request.messages) > max_model_len:  # even an empty message has at least one token, for its role
        raise context_exceeded(max_model_len, f"there are {len(request.messages)} messages", "messages")
    text = await _chat_text(request, tokenizer, template, variables, max_model_len)
    add_special_tokens = request.add_special_tokens is True
    tokenizing = Tokenizing(
        tokenizer, add_special_tokens, max_model_len, field="messages", truncation=truncation, must_fit=must_fit
    )
    (prompt,) = await _from_texts([text], tokenizing)
    return prompt


async def bad_word_tokens(params: SamplingParams, tokenizer: Tokenizer) -> list[list[int]]:
    """Return the sequences of tokens that `bad_words` rule out. Raise `InvalidRequest` if they are too many or long."""
    words = params.bad_words or ()
    if sum(map(len, words)) <= LONG_TEXT:
        return tokenize_bad_words(words, tokenizer)
    return await asyncio.to_thread(tokenize_bad_words, words, tokenizer)


async def _chat_text(
    request: ChatRequest,
    tokenizer: Tokenizer,
    template: ChatTemplate,
    variables: Mapping[str, Any],
    max_model_len: int,
) -> str:
    if request.chat_template is None:
        return await run_in_thread_if(not _is_short(request, variables), render, request, template, variables)
    return await render_request_template(
        request.chat_template,
        template,
        request.messages,
        max_characters=tokenizer.max_characters(max_model_len),
        add_generation_prompt=request.add_generation_prompt is not False,
        continue_final_message=request.continue_final_message is True,
        variables=variables,
    )


def render(request: ChatRequest, template: ChatTemplate, variables: Mapping[str, Any]) -> str:
    """Return the text of a chat's prompt. Raise `InvalidRequest`, with the template's own message if it raised one."""
    return template.render(
        request.messages,
        add_generation_prompt=request.add_generation_prompt is not False,
        continue_final_message=request.continue_final_message is True,
        variables=variables,
    )


def _split(
    prompt: str | list[str | int | list[int]], max_model_len: int, truncation: Truncation | None
) -> Sequence[str | list[int]]:
    """Return a list of the prompts, from any of the four types. Raise `InvalidRequest` for too many or mixed ones."""
    if isinstance(prompt, str):
        return [prompt]
    if not prompt:
        raise InvalidRequest("prompt must not be empty", "prompt")
    single = isinstance(prompt[0], int)
    if single and truncation is None:
        _check_length(len(prompt), max_model_len, "prompt")
    if not single and len(prompt) > MAX_SAMPLES:
        raise InvalidRequest(f"prompt must hold at most {MAX_SAMPLES} prompts, got {len(prompt)}", "prompt")
    if len(types := {type(part) for part in prompt}) > 1:
        names = " and ".join(sorted(type_.__name__ for type_ in types))
        raise InvalidRequest(f"prompt must hold only texts, only ids or only lists of ids, got {names}", "prompt")
    parts: list[Any] = prompt
    return [parts] if single else parts


def _is_short(request: ChatRequest, variables: Mapping[str, Any]) -> bool:
    """Return whether rendering is certainly quick: there are few messages, and they hold only short texts."""
    if len(request.messages) > MANY_MESSAGES or variables:
        return False
    parts = [part for message in request.messages for part in message.values()]
    return all(isinstance(part, str) for part in parts) and sum(map(len, parts)) <= LONG_TEXT


async def _from_texts(texts: list[str], tokenizing: Tokenizing) -> list[TokenizedPrompt]:
    if tokenizing.truncation is None:
        tokenizing.check_characters(texts)
    if sum(map(len, texts)) <= LONG_TEXT:
        return tokenizing.prompts(texts)
    return await asyncio.to_thread(tokenizing.prompts, texts)


def _batches(texts: list[str]) -> Iterator[list[str]]:
    """Yield the texts in order, in lists of at most `MAX_BATCH` characters, or of one longer text."""
    batch: list[str] = []
    length = 0
    for text in texts:
        if batch and length + len(text) > MAX_BATCH:
            yield batch
            batch, length = [], 0
        batch.append(text)
        length += len(text)
    yield batch


def _check_length(count: int, max_model_len: int, param: str) -> None:
    """Raise `InvalidRequest` if the prompt is empty or alone exceeds the context. `max_tokens` is checked elsewhere."""
    if not count:
        raise InvalidRequest(f"{param} must not be empty: it has no tokens", param)
    if count > max_model_len:
        raise context_exceeded(max_model_len, f"{param} has {count}", param)


def _check_listed(count: int, param: str) -> None:
    """Raise `InvalidRequest` if an answer cannot list so many tokens."""
    if count > MAX_TOKENS:
        raise InvalidRequest(f"an answer lists at most {MAX_TOKENS} tokens, but {param} has {count}", param)


def text_of(ids: Sequence[int], tokenizer: Tokenizer) -> str:
    """Return the text of a prompt's token ids, special tokens included.

    An incomplete character at the end is left out, since the output may complete it, and then has it.
    """
    return tokenizer.decode(ids, skip_special_tokens=False, final=False)


def _from_all_ids(
    prompts: list[list[int]], max_model_len: int, vocab_size: int, tokenizer: Tokenizer | None
) -> list[TokenizedPrompt]:
    return [_from_ids(ids, max_model_len, vocab_size, tokenizer) for ids in prompts]


def _from_ids(ids: list[int], max_model_len: int, vocab_size: int, tokenizer: Tokenizer | None) -> TokenizedPrompt:
    """Return a prompt of token ids, with their text if a tokenizer is given."""
    _check_length(len(ids), max_model_len, "prompt")
    check_ids(ids, vocab_size, "prompt")
    return TokenizedPrompt(_as_array(ids), None if tokenizer is None else text_of(ids, tokenizer))


def check_ids(ids: list[int], vocab_size: int, param: str) -> None:
    """Raise `InvalidRequest`, which names the field `param`, if an id is not one of the vocabulary's."""
    for piece in _pieces(ids):
        if min(piece) < 0 or max(piece) >= vocab_size:
            invalid = next(id for id in piece if not 0 <= id < vocab_size)
            raise InvalidRequest(
                f"{param} holds {brief(invalid)}, which is out of vocabulary: its ids go from 0 to {vocab_size - 1}",
                param,
            )


def _as_array(ids: list[int]) -> "array[int]":
    tokens = array("i")
    for piece in _pieces(ids):
        tokens += array("i", piece)
    return tokens


def _pieces(ids: list[int]) -> Iterator[list[int]]:
    """Yield the ids in pieces, between which other threads can run."""
    for start in range(0, len(ids), PIECE):
        yield ids[start : start + PIECE]
