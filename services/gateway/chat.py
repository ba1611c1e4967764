"""POST /v1/chat/completions"""

import time
from collections.abc import Iterable, Sequence
from typing import Any

from aiohttp import web

from services.gateway.api_requests import ChatRequest
from services.gateway.body import read
from services.gateway.bounds import CHARACTERS_PER_ID, check_repeated
from services.gateway.config import GatewayConfig
from services.gateway.gateway import GATEWAY, Gateway, begin_response
from services.gateway.generation import Generation, Update
from services.gateway.logprobs import chat_logprobs, has_many_logprobs, prompt_logprobs
from services.gateway.message import MessageReader, answering_role, echo_of, finish_reason
from services.gateway.prompt import (
    LONG_TEXT,
    PreparedPrompt,
    TokenizedPrompt,
    bad_word_tokens,
    chat_prompt,
    truncation_of,
)
from services.gateway.response import ResponseHead, StreamedTokenIds, has_many_ids, raw_ids, to_json, usage
from services.gateway.sampling import beam_settings, chat_params, priority_of
from services.gateway.stream import collect, stream
from services.gateway.structured_outputs import compile_chat_grammar
from services.gateway.threads import run_in_thread_if
from services.gateway.tools import for_template, must_call, named_tool, schemas
from shared.errors import InvalidRequest
from shared.params import SamplingParams, cache_salt
from shared.protocol import Welcome
from shared.text.message_parser import AUTO, NONE, MessageFormat, ParserChoice
from shared.text.messages import text_of
from shared.text.tool_parsers.tool_parser import Tools

MUCH_TEXT = 20_000  # characters; parsing them takes 4 ms, and 60 ms in the slowest format


async def chat_completions(http: web.Request) -> web.StreamResponse:
    """Answer with the model's next message, whole or as a stream."""
    gateway, arrived = http.app[GATEWAY], time.monotonic()
    begin_response(http, "chatcmpl-")
    request = await read(http, ChatRequest)
    id = begin_response(http, "chatcmpl-", request.request_id)
    prompt = await prepare_chat(gateway, request, arrived, id)
    if request.stream:
        head = ResponseHead.now(id, "chat.completion.chunk", prompt.adapter or gateway.model.name)
        encoder = _ChunkEncoder(head, request)
        return await stream(http, gateway, [prompt], encoder, request.stream_options)
    head = ResponseHead.now(id, "chat.completion", prompt.adapter or gateway.model.name)
    generations = await collect(gateway, [prompt])
    repeats_much = _repeats_much(request, prompt) or (request.return_token_ids is True and has_many_ids(generations))
    takes_long = has_many_logprobs(generations) or has_much_to_parse(generations) or repeats_much
    return await run_in_thread_if(takes_long, _respond, head, request, generations)


async def prepare_chat(gateway: Gateway, request: ChatRequest, arrived: float, id: str) -> PreparedPrompt:
    """Return the prompt of a chat, ready to be submitted. Raise `InvalidRequest`."""
    model = gateway.model
    adapter = await gateway.choose_adapter(request.model)
    params = chat_params(request, model.defaults)
    tools = _tools_to_parse(request, gateway)
    welcome = await gateway.backend.first_welcome()
    prompt = await tokenize_chat(gateway, request, params, welcome)
    _check_repeated(request, prompt, params.n)
    format = _format(request, model.parsers, tools, prompt.text or "")
    return gateway.prepare(
        prompt,
        welcome,
        params,
        default_max_tokens=model.defaults.max_tokens,
        priority=priority_of(request),
        arrived=arrived,
        request_id=id,
        grammar=await compile_chat_grammar(request, model, format),
        bad_words=await bad_word_tokens(params, model.tokenizer),
        cache_salt=cache_salt(request.cache_salt),
        adapter=adapter,
        format=format,
        beams=beam_settings(request),
        field="messages",
        shows_text=request.return_prompt_text is True,
    )


async def tokenize_chat(
    gateway: Gateway, request: ChatRequest, params: SamplingParams, welcome: Welcome, *, must_fit: bool = True
) -> TokenizedPrompt:
    """Return the prompt of a chat, cut if it asks for that.

    Raise `InvalidRequest`, also if it does not fit the context though it `must_fit`.
    """
    model, config = gateway.model, gateway.config
    if request.chat_template is not None:
        _check_trusted(config)
    return await chat_prompt(
        request,
        model.tokenizer,
        model.template,
        variables=_template_variables(request, config),
        max_model_len=welcome.max_model_len,
        truncation=truncation_of(request, params, model.defaults.max_tokens, welcome.max_model_len),
        must_fit=must_fit,
    )


def _check_trusted(config: GatewayConfig) -> None:
    """Raise `InvalidRequest` if templates are not taken from requests."""
    if not config.trust_request_chat_template:
        raise InvalidRequest(
            "chat_template is not taken from requests: start with --trust-request-chat-template", "chat_template"
        )
    if config.special_tokens_in_messages == "text":
        raise InvalidRequest(
            "chat_template is not taken from requests with --special-tokens-in-messages text, which only the server's "
            "own template keeps",
            "chat_template",
        )


def _check_repeated(request: ChatRequest, prompt: TokenizedPrompt, n: int) -> None:
    """Raise `InvalidRequest` if the choices, or in a stream the first chunk of each, would repeat too much."""
    copies = n if request.stream else 1
    if request.echo:
        check_repeated("echo", len(echo_of(request)), n)
    if request.return_prompt_text:
        check_repeated("return_prompt_text", len(prompt.text or ""), copies)
    if request.return_token_ids:
        check_repeated("return_token_ids", CHARACTERS_PER_ID * len(prompt.tokens), copies)


def _template_variables(request: ChatRequest, config: GatewayConfig) -> dict[str, Any]:
    """Return the variables of a request for the template. Those in chat_template_kwargs override its fields."""
    hidden = request.tool_choice == "none" and config.exclude_tools_when_tool_choice_none
    fields: dict[str, Any] = {
        "tools": None if hidden else for_template(request.tools or ()) or None,
        "documents": request.documents or None,
        "reasoning_effort": request.reasoning_effort,
        "enable_thinking": False if request.reasoning_effort == "none" else None,
    }
    return {name: value for name, value in fields.items() if value is not None} | (request.chat_template_kwargs or {})


def _tools_to_parse(request: ChatRequest, gateway: Gateway) -> Tools | None:
    """Return the tools that the model may call; None if calls are not to be taken out of its text.

    Raise `InvalidRequest` if that is needed and this server cannot do it.
    """
    if not request.tools or request.tool_choice == "none":
        return None
    model, named = gateway.model, gateway.config.tool_call_parser
    own_template = request.chat_template is None and model.template.exists
    if named in (AUTO, NONE) and own_template and not model.template.shows_tools:
        raise InvalidRequest(
            "the chat template of this model does not show tools: start with --chat-template FILE, or with "
            "--tool-call-parser NAME if the messages describe them",
            "tools",
        )
    if named == AUTO and model.parsers.tools is None:
        raise InvalidRequest(
            "no parser of tool calls fits this model's chat template: start with --tool-call-parser NAME, or with "
            "none to get calls as text",
            "tools",
        )
    if model.parsers.tools is not None:
        return schemas(request.tools, request.tool_choice)
    if must_call(request.tool_choice):
        raise InvalidRequest("tool_choice demands a call, which needs --tool-call-parser NAME", "tool_choice")
    return None


def _format(request: ChatRequest, parsers: ParserChoice, tools: Tools | None, prompt: str) -> MessageFormat | None:
    """Return how the outputs are taken apart; None if all of them is content."""
    if tools is None and parsers.reasoning is None:
        return None
    continued = None
    if request.continue_final_message:
        continued = text_of(request.messages[-1].get("content"))
    return MessageFormat(
        parsers,
        tools,
        parallel=request.parallel_tool_calls is not False and named_tool(request.tool_choice) is None,
        reasoning_is_open=parsers.reasoning_is_open(prompt, continued),
        reasoning_is_over=parsers.reasoning_is_over(prompt, continued),
    )


def has_much_to_parse(generations: Sequence[Generation]) -> bool:
    """Return whether taking the outputs apart would keep the loop too long."""
    parsed = (generation for generation in generations if generation.parsers)
    return sum(len(sample.text) for generation in parsed for sample in generation.text.samples) > MUCH_TEXT


def _repeats_much(request: ChatRequest, prompt: PreparedPrompt) -> bool:
    """Return whether encoding what the answer has of the prompt would keep the loop too long."""
    num_ids = len(prompt.tokens) if request.return_token_ids else 0
    return max(num_ids, len(prompt.text or "")) > LONG_TEXT


def _prompt_fields(request: ChatRequest, prompt: PreparedPrompt) -> dict[str, Any]:
    """Return the fields of a response, or of the first chunks of a stream, that repeat the prompt."""
    fields: dict[str, Any] = {}
    if request.return_token_ids:
        fields["prompt_token_ids"] = raw_ids(prompt.tokens)
    if request.return_prompt_text:
        fields["prompt_text"] = prompt.text
    return fields


def _shows_token_ids(request: ChatRequest, generation: Generation) -> bool:
    """Return whether choices have token ids. They would show the reasoning that `include_reasoning` leaves out."""
    hidden = request.include_reasoning is False and generation.num_reasoning_tokens is not None
    return request.return_token_ids is True and not hidden


def _respond(head: ResponseHead, request: ChatRequest, generations: Sequence[Generation]) -> web.Response:
    (generation,) = generations
    choices = [_choice(index, request, generation) for index in range(len(generation.text.samples))]
    count = generation.prompt.params.prompt_logprobs
    of_prompt = None if count is None else prompt_logprobs(generation.text.prompt_logprobs(), count)
    repeated = _prompt_fields(request, generation.prompt)
    return head.respond(choices, usage=usage(generations), prompt_logprobs=of_prompt, **repeated)


def _choice(index: int, request: ChatRequest, generation: Generation) -> dict[str, Any]:
    sample, logprobs = generation.text.samples[index], generation.logprobs[index]
    message: dict[str, Any] = {"role": answering_role(request), "content": sample.text, "refusal": None}
    if generation.parsers:
        reader = MessageReader(request, generation, index)
        message |= reader.read_whole(sample.text)
        logprobs = reader.visible(logprobs)
    if echo := echo_of(request):
        message["content"] = echo + (message["content"] or "")
    return {
        "index": index,
        "message": message,
        "logprobs": chat_logprobs(logprobs, request.return_tokens_as_token_ids is True) if request.logprobs else None,
        "finish_reason": finish_reason(request, generation, index),
        "stop_reason": sample.stop_reason,
        **({"token_ids": raw_ids(sample.token_ids)} if _shows_token_ids(request, generation) else {}),
    }


class _ChunkEncoder:
    """Encodes the chunks of a chat: first the role, then parts of the message, the last one with the finish reason."""

    def __init__(self, head: ResponseHead, request: ChatRequest) -> None:
        self.prefix = head.chunk_prefix  # a chunk's JSON up to its choices
        self._request = request
        self._readers: dict[int, MessageReader] = {}  # by choice, if the outputs are parsed
        self._as_ids = request.return_tokens_as_token_ids is True
        self._token_ids: StreamedTokenIds | None = None  # if choices have them
        self._echo = b""  # JSON
        self._prompt_fields = b""  # JSON, as further fields

    def openings(self, index: int, generation: Generation) -> Iterable[tuple[bytes, bytes]]:
        yield _OPENING % (index, to_json(answering_role(self._request))), self._prompt_fields
        if self._echo:
            yield _MIDDLE % (index, b'{"content":' + self._echo + b"}", b"null", b""), b""

    async def prepare(self, prompt_index: int, generation: Generation) -> None:
        """Make what the first chunks of each choice have of the prompt and the last message."""
        request, prompt = self._request, generation.prompt
        self._token_ids = StreamedTokenIds() if _shows_token_ids(request, generation) else None
        if echo := echo_of(request):
            self._echo = to_json(echo)
        if request.return_token_ids or request.return_prompt_text:
            fields = await run_in_thread_if(_repeats_much(request, prompt), _prompt_fields, request, prompt)
            self._prompt_fields = b"," + to_json(fields)[1:-1]

    def choice(self, index: int, generation: Generation, update: Update) -> bytes:
        sample, entries = generation.text.samples[update.sample], update.logprobs
        if generation.parsers:
            if index not in self._readers:
                self._readers[index] = MessageReader(self._request, generation, update.sample)
            reader = self._readers[index]
            parsed = reader.read(update.text, entries)
            if not parsed and sample.finish_reason is None:
                return b""
            delta, entries = to_json(parsed or {"content": ""}), reader.take_logprobs()
        else:
            delta = b'{"content":' + to_json(update.text) + b"}"
        # there is a content even if it is "", since clients join contents without a check
        logprobs = to_json(chat_logprobs(entries, self._as_ids)) if self._request.logprobs else b"null"
        ids = b"" if self._token_ids is None else b',"token_ids":' + to_json(self._token_ids.take(index, sample))
        if sample.finish_reason is None:
            return _MIDDLE % (index, delta, logprobs, ids)
        reason = finish_reason(self._request, generation, update.sample)
        return _LAST % (index, delta, logprobs, to_json(reason), to_json(sample.stop_reason), ids)


_OPENING = b'{"index":%d,"delta":{"role":%b,"content":""},"logprobs":null,"finish_reason":null}'
_MIDDLE = b'{"index":%d,"delta":%b,"logprobs":%b,"finish_reason":null%b}'
_LAST = b'{"index":%d,"delta":%b,"logprobs":%b,"finish_reason":%b,"stop_reason":%b%b}'
