"""Tests of tool calls in chats: what a client gets of them, whole and as a stream, and which tools are refused."""

import asyncio
import json
import threading
from collections.abc import Sequence
from typing import Any, cast

import pytest
from tokenizers import AddedToken

from shared.text.deltas import Delta
from shared.text.message_parser import MessageParser
from shared.text.tokenizer import Tokenizer
from tests.gateway.fakes import TOKENIZER, FakeBackend, ends, ids, says, serve
from tests.text.tool_outputs import WRITERS, Call
from tests.text.tool_templates import TEMPLATES
from tests.text.vocabulary import CHATML, make_backend

PATH = "/v1/chat/completions"
MESSAGES = [{"role": "user", "content": "hi"}]
PARAMETERS = {"type": "object", "properties": {"city": {"type": "string"}, "days": {"type": "integer"}}}
TOOL = {"type": "function", "function": {"name": "get_weather", "description": "d", "parameters": PARAMETERS}}
OTHER: dict[str, Any] = {"type": "function", "function": {"name": "get-time.now"}}
TOOLS = [TOOL, OTHER]
WEATHER, TIME = Call("get_weather", {"city": 'São "Paulo"', "days": 3}), Call("get-time.now", {})
HERMES = TEMPLATES["hermes"]


def scripted(*texts: str | list[int]) -> FakeBackend:
    """Return a backend of which sample i generates the i-th text, byte by byte."""
    return FakeBackend(says(*texts), max_model_len=2048)


def joined(chunks: list[dict[str, Any]]) -> dict[int, dict[str, Any]]:
    """Return each choice's message, as a client joins it from a stream."""
    messages: dict[int, dict[str, Any]] = {}
    for choice in (choice for chunk in chunks for choice in chunk["choices"]):
        message, delta = messages.setdefault(choice["index"], {"content": ""}), choice["delta"]
        for name in ("content", "reasoning", "reasoning_content"):
            if name in delta:
                message[name] = message.get(name, "") + delta[name]
        indices = [call["index"] for call in delta.get("tool_calls", ())]
        assert len(set(indices)) == len(indices), "a client takes the calls of one delta by their index"
        for call in delta.get("tool_calls", ()):
            calls = message.setdefault("tool_calls", [])
            if call["index"] == len(calls):
                assert call["type"] == "function"
                calls.append({"id": call["id"], "type": "function", "function": {"name": "", "arguments": ""}})
            else:
                assert set(call) == {"index", "function"}, "id and name come once"
            function = calls[call["index"]]["function"]
            function["name"] += call["function"].get("name", "")
            function["arguments"] += call["function"]["arguments"]
    return messages


def calls_of(message: dict[str, Any]) -> list[Call]:
    return [
        Call(call["function"]["name"], json.loads(call["function"]["arguments"]))
        for call in message.get("tool_calls", ())
    ]


@pytest.mark.parametrize("family", WRITERS)
async def test_a_call_as_a_whole_and_as_a_stream(family: str) -> None:
    """TOL-01, TOL-06: the script comes byte by byte."""
    before = "<|channel|>commentary<|message|>So:<|end|>" if family == "openai" else "So:"
    text = before + WRITERS[family]([WEATHER, TIME])
    template = TEMPLATES.get(family, HERMES)
    parsers = {"tool_call_parser": family} | ({"reasoning_parser": "none"} if family != "openai" else {})
    async with serve(scripted(text), template=template, **parsers) as client:
        choice = (await client.chat(tools=TOOLS))["choices"][0]
        chunks = await client.stream_chat(tools=TOOLS)
    assert choice["finish_reason"] == "tool_calls"
    assert choice["message"]["content"] == "So:"
    assert calls_of(choice["message"]) == [WEATHER, TIME]
    assert all(set(call) == {"id", "type", "function"} for call in choice["message"]["tool_calls"])
    streamed = joined(chunks)[0]
    assert ends(chunks) == {0: ["tool_calls"]}
    assert (streamed["content"], calls_of(streamed)) == ("So:", [WEATHER, TIME])
    assert [call["function"] for call in streamed["tool_calls"]] == [
        call["function"] for call in choice["message"]["tool_calls"]
    ]


async def test_the_content_beside_a_lone_call_is_null() -> None:
    async with serve(scripted(WRITERS["hermes"]([TIME])), template=HERMES) as client:
        message = (await client.chat(tools=TOOLS))["choices"][0]["message"]
        assert message["content"] is None
        assert "reasoning" not in message
    async with serve(scripted(""), template=HERMES) as client:
        message = (await client.chat(tools=TOOLS))["choices"][0]["message"]
        assert (message["content"], "tool_calls" in message) == ("", False)


async def test_a_long_output_is_taken_apart_off_the_loop(monkeypatch: pytest.MonkeyPatch) -> None:
    threads: list[bool] = []
    finish = MessageParser.finish

    def record(parser: MessageParser) -> list[Delta]:
        threads.append(threading.current_thread() is threading.main_thread())
        return finish(parser)

    monkeypatch.setattr(MessageParser, "finish", record)
    call = Call("get_weather", {"city": "x" * 21_000})
    for calls in ([TIME], [call]):
        backend = FakeBackend(says(WRITERS["hermes"](calls)), max_model_len=32_768)
        backend.burst = 4096
        async with serve(backend, template=HERMES) as client:
            assert calls_of((await client.chat(tools=TOOLS))["choices"][0]["message"]) == calls
    assert threads == [True, False]


async def test_rows_that_come_together_give_one_chunk() -> None:
    """Ten tokens a write: a chunk may begin a call and have a piece of its arguments."""
    backend = scripted("So:" + WRITERS["hermes"]([WEATHER, TIME]))
    backend.burst = 10
    async with serve(backend, template=HERMES) as client:
        chunks = await client.stream_chat(tools=TOOLS)
    assert calls_of(joined(chunks)[0]) == [WEATHER, TIME]
    assert all(chunk["choices"][0]["delta"] for chunk in chunks[:-1]), "no chunk while nothing is known"


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(
    ("choice", "exclude", "shown"),
    [("none", False, True), ("none", True, False), ("auto", True, True), (None, False, True)],
)
async def test_choices_without_a_call(choice: str | None, exclude: bool, shown: bool, stream: bool) -> None:
    """TOL-09: with none, the text is what the model wrote; --exclude-tools-when-tool-choice-none hides the tools."""
    text = "one two" if choice != "none" else WRITERS["hermes"]([TIME])
    backend = scripted(text)
    async with serve(backend, template=HERMES, exclude_tools_when_tool_choice_none=exclude) as client:
        fields = {"tools": TOOLS} | ({"tool_choice": choice} if choice else {})
        if stream:
            chunks = await client.stream_chat(**fields)
            message, reason = joined(chunks)[0], ends(chunks)[0][0]
        else:
            answer = (await client.chat(**fields))["choices"][0]
            message, reason = answer["message"], answer["finish_reason"]
    assert (message["content"], "tool_calls" in message, reason) == (text, False, "stop")
    prompt = TOKENIZER.decode(backend.requests[0].tokens)
    assert ("get_weather" in prompt) == shown


@pytest.mark.parametrize("stream", [False, True])
async def test_only_the_first_call_is_kept(stream: bool) -> None:
    async with serve(scripted(WRITERS["hermes"]([WEATHER, TIME])), template=HERMES) as client:
        fields: dict[str, Any] = {"tools": TOOLS, "parallel_tool_calls": False}
        if stream:
            message = joined(await client.stream_chat(**fields))[0]
        else:
            message = (await client.chat(**fields))["choices"][0]["message"]
    assert calls_of(message) == [WEATHER]


@pytest.mark.parametrize("stream", [False, True])
async def test_a_call_that_is_cut_off(stream: bool) -> None:
    """TOL-10: what came of it, and the reason that it ended."""
    text = WRITERS["hermes"]([WEATHER])
    async with serve(scripted(text), template=HERMES) as client:
        whole = len(TOKENIZER.encode(text))
        for extra, reason in (
            ({"max_tokens": 75}, "length"),
            ({"max_tokens": whole}, "length"),
            ({"stop": "Paulo"}, "stop"),
        ):
            fields = {"tools": TOOLS} | extra
            if stream:
                chunks = await client.stream_chat(**fields)
                message, finish = joined(chunks)[0], ends(chunks)[0][0]
            else:
                choice = (await client.chat(**fields))["choices"][0]
                message, finish = choice["message"], choice["finish_reason"]
            assert finish == reason
            assert message["tool_calls"][0]["function"]["name"] == "get_weather"
            assert message["tool_calls"][0]["function"]["arguments"].startswith('{"city": "S')


async def test_samples_and_log_probabilities() -> None:
    """Every token has an entry, in a chunk with or after its text."""
    call = WRITERS["hermes"]([TIME])
    backend = scripted("one two", call)
    async with serve(backend, template=HERMES) as client:
        fields = {"tools": TOOLS, "n": 2, "logprobs": True}
        choices = (await client.chat(**fields))["choices"]
        chunks = await client.stream_chat(**fields, stream_options={"include_usage": True})
    assert [choice["finish_reason"] for choice in choices] == ["stop", "tool_calls"]
    assert chunks[-1]["usage"]["completion_tokens"] == sum(len(choice["logprobs"]["content"]) for choice in choices)
    for index, choice in enumerate(choices):
        streamed = [
            entry["token"]
            for chunk in chunks
            for part in chunk["choices"]
            if part["index"] == index and part["logprobs"]
            for entry in part["logprobs"]["content"]
        ]
        assert streamed == [entry["token"] for entry in choice["logprobs"]["content"]]
        assert len(streamed) == len(TOKENIZER.encode(["one two", call][index])) + 1
    assert ends(chunks) == {0: ["stop"], 1: ["tool_calls"]}
    assert "completion_tokens_details" not in chunks[-1]["usage"]


def special_tokenizer() -> Tokenizer:
    """Return a tokenizer in which a family's markers, and another word, are special tokens."""
    backend = make_backend()
    backend.add_special_tokens([AddedToken(name, special=True) for name in ("[TOOL_CALLS]", "[ARGS]", "[OTHER]")])
    return Tokenizer(backend, special={"eos_token": "</s>"}, eos_token_ids=[cast(int, backend.token_to_id("</s>"))])


@pytest.mark.parametrize("stream", [False, True])
async def test_markers_that_are_special_tokens_are_seen_by_the_parser_only(stream: bool) -> None:
    tokenizer = special_tokenizer()
    output = tokenizer.encode("[OTHER]one [ARGS][TOOL_CALLS]get-time.now[ARGS]{}")
    async with serve(scripted(output), template=TEMPLATES["mistral"], tokenizer=tokenizer) as client:
        for fields, content, calls in (
            ({"tools": TOOLS}, "one", [TIME]),
            ({"tools": TOOLS, "tool_choice": "none"}, "one get-time.now{}", []),
            ({}, "one get-time.now{}", []),
        ):
            if stream:
                message = joined(await client.stream_chat(**fields))[0]
            else:
                message = (await client.chat(**fields))["choices"][0]["message"]
            assert (message["content"], calls_of(message)) == (content, calls)


async def test_a_stop_string_is_looked_for_in_what_the_model_wrote() -> None:
    async with serve(scripted("one" + WRITERS["hermes"]([TIME])), template=HERMES) as client:
        choice = (await client.chat(tools=TOOLS, stop="</tool_call>"))["choices"][0]
    assert (choice["stop_reason"], choice["finish_reason"]) == ("</tool_call>", "tool_calls")
    assert calls_of(choice["message"]) == [TIME]


async def test_a_conversation_goes_on_with_the_result() -> None:
    """TPL-01, TPL-09: the call of an answer, and its result, in the next prompt."""
    backend = scripted(WRITERS["hermes"]([WEATHER]))
    async with serve(backend, template=HERMES) as client:
        message = (await client.chat(tools=TOOLS))["choices"][0]["message"]
        for content in ("It rains.", [{"type": "text", "text": "It rains."}]):
            result = {"role": "tool", "tool_call_id": message["tool_calls"][0]["id"], "content": content}
            await client.chat(tools=TOOLS, messages=[*MESSAGES, message, result])
    prompts = [TOKENIZER.decode(request.tokens, skip_special_tokens=False) for request in backend.requests]
    assert WRITERS["hermes"]([WEATHER]) in prompts[1]
    assert "<tool_response>\nIt rains.\n</tool_response>" in prompts[1]
    assert "None" not in prompts[1].split("</tools>")[1]
    assert prompts[1] == prompts[2]


async def test_nulls_of_a_tool_are_not_shown() -> None:
    backend = scripted("one")
    tool = {"type": "function", "function": {"name": "f", "description": None, "parameters": None, "strict": None}}
    async with serve(backend, template=HERMES) as client:
        await client.chat(tools=[tool])
    assert '<tools>{"type": "function", "function": {"name": "f"}}</tools>' in TOKENIZER.decode(
        backend.requests[0].tokens
    )


@pytest.mark.parametrize(
    ("fields", "param", "words"),
    [
        ({"tools": ["f"]}, "tools[0]", "object"),
        ({"tools": [{"type": "retrieval"}]}, "tools[0]", "of type 'function'"),
        ({"tools": [{"type": "function", "name": "f"}]}, "tools[0].function", "must be an object"),
        ({"tools": [{"type": "function", "function": {}}]}, "tools[0].function.name", "1 to 64"),
        ({"tools": [{"type": "function", "function": {"name": "a b"}}]}, "tools[0].function.name", "1 to 64"),
        ({"tools": [{"type": "function", "function": {"name": "a" * 65}}]}, "tools[0].function.name", "1 to 64"),
        ({"tools": [TOOL, TOOL]}, "tools[1].function.name", "name of two tools"),
        (
            {"tools": [{"type": "function", "function": {"name": "f", "parameters": []}}]},
            "tools[0].function.parameters",
            "JSON schema",
        ),
        ({"tools": [{"type": "function", "function": {"name": "f", "strict": 1}}]}, "tools[0].function.strict", "true"),
        ({"tools": TOOLS, "tool_choice": "any"}, "tool_choice", "'required'"),
        ({"tools": TOOLS, "tool_choice": {"type": "function"}}, "tool_choice", "must be"),
        ({"tools": TOOLS, "tool_choice": 1}, "tool_choice", "str"),
        (
            {"tools": TOOLS, "tool_choice": {"type": "function", "function": {"name": "f"}}},
            "tool_choice",
            "not among the tools",
        ),
        ({"tool_choice": "required"}, "tool_choice", "needs tools"),
        ({"parallel_tool_calls": "no"}, "parallel_tool_calls", "bool"),
    ],
)
@pytest.mark.parametrize("stream", [False, True])
async def test_what_is_wrong_with_tools_is_said(fields: dict[str, Any], param: str, words: str, stream: bool) -> None:
    """TOL-08, TOL-09."""
    async with serve(template=HERMES) as client:
        status, error = await client.refused(PATH, {"messages": MESSAGES, "stream": stream} | fields)
    assert (status, error["param"]) == (400, param)
    assert words in error["message"]


async def test_a_model_that_cannot_be_offered_tools_says_what_to_set() -> None:
    unknown = "{% if tools %}{{ tools }}{% endif %}" + CHATML
    body = {"messages": MESSAGES, "tools": TOOLS}
    async with serve(template=CHATML) as client:
        status, error = await client.refused(PATH, body)
        assert (status, error["param"], "--chat-template" in error["message"]) == (400, "tools", True)
        await client.chat(tools=TOOLS, tool_choice="none")
    async with serve(template=CHATML, tool_call_parser="none") as client:
        assert (await client.refused(PATH, body))[0] == 400, "nobody would know of the tools"
    async with serve(scripted(WRITERS["hermes"]([TIME])), template=CHATML, tool_call_parser="hermes") as client:
        assert calls_of((await client.chat(tools=TOOLS))["choices"][0]["message"]) == [TIME]
    async with serve(template=unknown) as client:
        status, error = await client.refused(PATH, body)
        assert (status, error["param"], "--tool-call-parser" in error["message"]) == (400, "tools", True)
    async with serve(scripted(WRITERS["hermes"]([TIME])), template=unknown, tool_call_parser="none") as client:
        message = (await client.chat(tools=TOOLS))["choices"][0]["message"]
        assert message["content"] == WRITERS["hermes"]([TIME])


async def test_a_hundred_streams_that_may_call_end_once_each() -> None:
    """STR-16: by the end of the output, by max_tokens and by a stop string, with calls between them."""
    call = WRITERS["hermes"]([TIME])

    def script(prompt: Sequence[int], _: int) -> list[int]:
        return ids(call if "please call" in TOKENIZER.decode(prompt) else "one two three")

    kinds: list[tuple[str, dict[str, Any], str]] = [
        ("talk", {}, "stop"),
        ("call", {}, "tool_calls"),
        ("talk", {"max_tokens": 2}, "length"),
        ("talk", {"stop": "o t"}, "stop"),
    ]
    async with serve(FakeBackend(script, max_model_len=2048), template=HERMES) as client:

        async def end(word: str, fields: dict[str, Any], reason: str) -> None:
            messages = [{"role": "user", "content": f"please {word}"}]
            options = {"include_usage": True}
            *chunks, usage = await client.stream_chat(messages=messages, tools=TOOLS, stream_options=options, **fields)
            assert [chunk["choices"][0]["finish_reason"] for chunk in chunks] == [None] * (len(chunks) - 1) + [reason]
            assert usage["choices"] == []
            assert len(calls_of(joined(chunks)[0])) == (word == "call")

        await asyncio.gather(*(end(*kinds[at % 4]) for at in range(100)))


async def test_streams_of_many_ends() -> None:
    """STR-16: each choice has one finish reason, however it ends."""
    backend = scripted("one two", WRITERS["hermes"]([TIME]))
    async with serve(backend, template=HERMES) as client:
        for extra, reasons in (
            ({}, ["stop", "tool_calls"]),
            ({"max_tokens": 2}, ["length", "length"]),
            ({"stop": "o"}, ["stop", "stop"]),
        ):
            chunks = await client.stream_chat(tools=TOOLS, n=2, stream_options={"include_usage": True}, **extra)
            assert ends(chunks) == {index: [reason] for index, reason in enumerate(reasons)}
            assert chunks[-1]["choices"] == []
