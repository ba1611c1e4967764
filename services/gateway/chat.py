"""POST /v1/chat/completions"""

import time
from collections.abc import Sequence
from typing import Any

from aiohttp import web

from services.gateway.api_requests import ChatRequest
from services.gateway.body import read
from services.gateway.config import GatewayConfig
from services.gateway.gateway import GATEWAY, REQUEST_ID, RESPONSE_ID, Gateway
from services.gateway.generation import Generation, Update
from services.gateway.logprobs import chat_logprobs, has_many_logprobs, prompt_logprobs
from services.gateway.message import MessageReader, finish_reason
from services.gateway.prompt import PreparedPrompt, TokenizedPrompt, bad_word_tokens, chat_prompt
from services.gateway.response import ResponseHead, to_json, usage
from services.gateway.sampling import beam_settings, chat_params, priority_of
from services.gateway.stream import collect, stream
from services.gateway.structured_outputs import compile_chat_grammar
from services.gateway.threads import run_in_thread_if
from services.gateway.tools import for_template, must_call, named_tool, schemas
from shared.errors import InvalidRequest
from shared.params import cache_salt
from shared.protocol import Welcome
from shared.text.message_parser import AUTO, NONE, MessageFormat, ParserChoice
from shared.text.messages import text_of
from shared.text.tool_parsers.tool_parser import Tools

MUCH_TEXT = 20_000  # characters; parsing them takes 4 ms, and 60 ms in the slowest format


async def chat_completions(http: web.Request) -> web.StreamResponse:
    """Answer with the model's next message, whole or as a stream."""
    gateway, arrived = http.app[GATEWAY], time.monotonic()
    id = http[RESPONSE_ID] = f"chatcmpl-{http[REQUEST_ID]}"
    request = await read(http, ChatRequest)
    prompt = await _prepare(gateway, request, arrived, id)
    if request.stream:
        head = ResponseHead.now(id, "chat.completion.chunk", gateway.model.name)
        encoder = _ChunkEncoder(head, request)
        return await stream(http, gateway, [prompt], encoder, request.stream_options)
    head = ResponseHead.now(id, "chat.completion", gateway.model.name)
    generations = await collect(gateway, [prompt])
    takes_long = has_many_logprobs(generations) or _has_much_to_parse(generations)
    return await run_in_thread_if(takes_long, _respond, head, request, generations)


async def _prepare(gateway: Gateway, request: ChatRequest, arrived: float, id: str) -> PreparedPrompt:
    model = gateway.model
    model.check(request.model)
    params = chat_params(request, model.defaults)
    tools = _tools_to_parse(request, gateway)
    welcome = await gateway.backend.first_welcome()
    prompt = await tokenize_chat(gateway, request, welcome)
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
        format=format,
        beams=beam_settings(request),
    )


async def tokenize_chat(
    gateway: Gateway, request: ChatRequest, welcome: Welcome, *, must_fit: bool = True
) -> TokenizedPrompt:
    """Return the prompt of a chat. Raise `InvalidRequest`, also if it does not fit the context though it `must_fit`."""
    return await chat_prompt(
        request,
        gateway.model.tokenizer,
        gateway.model.template,
        variables=_template_variables(request, gateway.config),
        max_model_len=welcome.max_model_len,
        must_fit=must_fit,
    )


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
    if named in (AUTO, NONE) and model.template.exists and not model.template.shows_tools:
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


def _has_much_to_parse(generations: Sequence[Generation]) -> bool:
    """Return whether taking the outputs apart would keep the loop too long."""
    parsed = (generation for generation in generations if generation.parsers)
    return sum(len(sample.text) for generation in parsed for sample in generation.text.samples) > MUCH_TEXT


def _respond(head: ResponseHead, request: ChatRequest, generations: Sequence[Generation]) -> web.Response:
    (generation,) = generations
    choices = [_choice(index, request, generation) for index in range(len(generation.text.samples))]
    count = generation.prompt.params.prompt_logprobs
    of_prompt = None if count is None else prompt_logprobs(generation.text.prompt_logprobs(), count)
    return head.respond(choices, usage=usage(generations), prompt_logprobs=of_prompt)


def _choice(index: int, request: ChatRequest, generation: Generation) -> dict[str, Any]:
    sample, logprobs = generation.text.samples[index], generation.logprobs[index]
    message: dict[str, Any] = {"role": "assistant", "content": sample.text, "refusal": None}
    if generation.parsers:
        reader = MessageReader(request, generation, index)
        message |= reader.read_whole(sample.text)
        logprobs = reader.visible(logprobs)
    return {
        "index": index,
        "message": message,
        "logprobs": chat_logprobs(logprobs) if request.logprobs else None,
        "finish_reason": finish_reason(request, generation, index),
        "stop_reason": sample.stop_reason,
    }


class _ChunkEncoder:
    """Encodes the chunks of a chat: first the role, then parts of the message, the last one with the finish reason."""

    def __init__(self, head: ResponseHead, request: ChatRequest) -> None:
        self.prefix = head.chunk_prefix  # a chunk's JSON up to its choices
        self._request = request
        self._readers: dict[int, MessageReader] = {}  # by choice, if the outputs are parsed

    def opening(self, index: int, generation: Generation) -> bytes:
        return _OPENING % index

    async def prepare(self, prompt_index: int, generation: Generation) -> None:
        """Do nothing: only an echo is made before the first chunk, and a chat has none."""

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
        logprobs = to_json(chat_logprobs(entries)) if self._request.logprobs else b"null"
        if sample.finish_reason is None:
            return _MIDDLE % (index, delta, logprobs)
        reason = finish_reason(self._request, generation, update.sample)
        return _LAST % (index, delta, logprobs, to_json(reason), to_json(sample.stop_reason))


_OPENING = b'{"index":%d,"delta":{"role":"assistant","content":""},"logprobs":null,"finish_reason":null}'
_MIDDLE = b'{"index":%d,"delta":%b,"logprobs":%b,"finish_reason":null}'
_LAST = b'{"index":%d,"delta":%b,"logprobs":%b,"finish_reason":%b,"stop_reason":%b}'
