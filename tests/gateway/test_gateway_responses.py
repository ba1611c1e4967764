"""Tests of /v1/responses: what becomes of its input, and its output as a whole and as a stream.

Answers and events are checked against the types of OpenAI's client, too.
"""

import json
from typing import Any

import pytest
from openai.types.responses import Response, ResponseStreamEvent
from pydantic import TypeAdapter

from services.gateway.api_requests import ResponsesRequest, decode
from services.gateway.responses_input import Chat
from shared.errors import EngineFailure, InvalidRequest
from tests.gateway.fakes import MODEL, TOKENIZER, Client, FakeBackend, error_of, ids, says, serve
from tests.gateway.test_gateway_reasoning import OUTPUT, THINKING
from tests.gateway.test_gateway_tools import HERMES, PARAMETERS, TIME, WEATHER, scripted
from tests.text.tool_outputs import WRITERS
from tests.text.vocabulary import CHATML

EVENT: TypeAdapter[Any] = TypeAdapter(ResponseStreamEvent)
TOOLS: list[dict[str, Any]] = [
    {"type": "function", "name": "get_weather", "description": "d", "parameters": PARAMETERS},
    {"type": "function", "name": "get-time.now"},
]
LOGPROBS = ["message.output_text.logprobs"]
CALLS = WRITERS["hermes"]([WEATHER, TIME])


def chat_of(**fields: Any) -> Any:
    """Return the chat that a request becomes."""
    request, ignored = decode(json.dumps({"input": "hi"} | fields).encode(), ResponsesRequest)
    assert not ignored
    return Chat(request).request


def messages(*items: Any, **fields: Any) -> Any:
    return chat_of(input=list(items), **fields).messages


async def respond(client: Client, **fields: Any) -> Any:
    answer = await client.respond(**fields)
    Response.model_validate(answer)
    return answer


async def stream(client: Client, **fields: Any) -> list[dict[str, Any]]:
    """Return the events of a stream. They are numbered, and its deltas joined are what the items have in the end."""
    events = await client.stream_response(**fields)
    for number, event in enumerate(events):
        EVENT.validate_python(event)
        assert event["sequence_number"] == number
    texts: dict[int, str] = {}
    logprobs: dict[int, list[Any]] = {}
    for event in events:
        if event["type"].endswith(".delta"):
            index = event["output_index"]
            texts[index] = texts.get(index, "") + event["delta"]
            logprobs[index] = logprobs.get(index, []) + event.get("logprobs", [])
    last = events[-1]["response"]
    if last["status"] != "failed":
        for index, item in enumerate(last["output"]):
            text = item["arguments"] if item["type"] == "function_call" else item["content"][0]["text"]
            assert texts.get(index, "") == text
            if item["type"] == "message":
                assert logprobs.get(index, []) == item["content"][0]["logprobs"]
        done = [event["item"] for event in events if event["type"] == "response.output_item.done"]
        assert done == last["output"]
    return events


def without_ids(answer: Any) -> Any:
    """Return an answer without what is new in each."""
    if isinstance(answer, list):
        return [without_ids(one) for one in answer]
    if not isinstance(answer, dict):
        return answer
    new = ("id", "call_id", "created_at", "completed_at")
    return {name: without_ids(value) for name, value in answer.items() if name not in new}


# input


def test_a_string_is_a_users_message() -> None:
    chat = chat_of(instructions="Be brief.", input="hi")
    assert chat.messages == [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "hi"}]


def test_messages_may_have_parts_or_no_type() -> None:
    parts = [{"type": "input_text", "text": "a"}, {"type": "input_text", "text": "b"}]
    answer = [{"type": "output_text", "text": "c", "annotations": []}, {"type": "refusal", "refusal": "d"}]
    assert messages(
        {"role": "developer", "content": "x"},
        {"type": "message", "role": "user", "content": parts},
        {"type": "message", "role": "assistant", "id": "msg_1", "status": "completed", "content": answer},
    ) == [
        {"role": "developer", "content": "x"},
        {"role": "user", "content": [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]},
        {"role": "assistant", "content": [{"type": "text", "text": "c"}, {"type": "text", "text": "d"}]},
    ]  # fmt: skip


def call(id: str, arguments: str = "{}") -> dict[str, Any]:
    return {"type": "function_call", "id": f"fc_{id}", "call_id": id, "name": "f", "arguments": arguments}


def output(id: str, output: Any = "x") -> dict[str, Any]:
    return {"type": "function_call_output", "call_id": id, "output": output}


def test_the_items_of_one_turn_are_one_message() -> None:
    thought = {"type": "reasoning", "id": "rs_1", "summary": [], "content": [{"type": "reasoning_text", "text": "t"}]}
    text = {"role": "assistant", "content": "c"}
    chat_call = {"type": "function", "function": {"name": "f", "arguments": "{}"}}
    parts = [{"type": "input_text", "text": "y"}]
    assert messages(
        {"role": "user", "content": "q"}, thought, text, call("1"), call("2"), output("1"), output("2", parts),
        call("3"), output("3"), text, text, thought, text,
    ) == [
        {"role": "user", "content": "q"},
        {
            "role": "assistant", "reasoning_content": "t", "content": "c",
            "tool_calls": [{"id": "1", **chat_call}, {"id": "2", **chat_call}],
        },
        {"role": "tool", "tool_call_id": "1", "content": "x"},
        {"role": "tool", "tool_call_id": "2", "content": [{"type": "text", "text": "y"}]},
        {"role": "assistant", "tool_calls": [{"id": "3", **chat_call}]},
        {"role": "tool", "tool_call_id": "3", "content": "x"},
        text,
        text,
        {"role": "assistant", "reasoning_content": "t", "content": "c"},
    ]  # fmt: skip


def test_reasoning_may_be_a_summary_or_encrypted() -> None:
    summary = {"type": "reasoning", "id": "r", "summary": [{"type": "summary_text", "text": "s"}]}
    encrypted = {"type": "reasoning", "id": "r", "summary": [], "encrypted_content": "x"}
    assert messages(summary) == [{"role": "assistant", "reasoning_content": "s"}]
    assert messages(encrypted, {"role": "assistant", "content": "c"}) == [{"role": "assistant", "content": "c"}]


def test_tools_have_a_function_of_their_own_in_a_chat() -> None:
    tools = [TOOLS[0] | {"strict": True}]
    assert chat_of(tools=tools).tools == [
        {
            "type": "function",
            "function": {"name": "get_weather", "description": "d", "parameters": PARAMETERS, "strict": True},
        }
    ]


@pytest.mark.parametrize("choice", ["none", "auto", "required"])
def test_choices_in_words_are_those_of_a_chat(choice: str) -> None:
    assert chat_of(tools=TOOLS, tool_choice=choice).tool_choice == choice


def test_a_choice_may_name_a_function_or_allow_some() -> None:
    name = {"type": "function", "name": "get_weather"}
    chat = chat_of(tools=TOOLS, tool_choice=name)
    assert chat.tool_choice == {"type": "function", "function": {"name": "get_weather"}}
    chat = chat_of(tools=TOOLS, tool_choice={"type": "allowed_tools", "mode": "required", "tools": [name]})
    assert (chat.tool_choice, [tool["function"]["name"] for tool in chat.tools]) == ("required", ["get_weather"])


def test_the_form_of_the_text_is_that_of_a_chat() -> None:
    schema = {"type": "object"}
    form = {"type": "json_schema", "name": "n", "schema": schema, "strict": True}
    chat = chat_of(text={"format": form, "verbosity": "low"})
    assert chat.response_format == {
        "type": "json_schema",
        "json_schema": {"name": "n", "schema": schema, "strict": True},
    }
    assert chat_of(text={"format": {"type": "json_object"}}).response_format == {"type": "json_object"}
    assert chat_of(text={}).response_format is None


async def test_the_prompt_and_the_sampling_are_those_of_a_chat() -> None:
    backend = FakeBackend()
    fields: dict[str, Any] = {
        "temperature": 0.5, "top_p": 0.5, "top_k": 5, "min_p": 0.1, "seed": 3, "stop": ["x"], "stop_token_ids": [5],
        "include_stop_str_in_output": True, "ignore_eos": True, "min_tokens": 1, "presence_penalty": 1,
        "frequency_penalty": 1, "repetition_penalty": 2, "allowed_token_ids": ids("one"), "bad_words": ["two"],
        "logit_bias": {"7": 1}, "skip_special_tokens": False, "spaces_between_special_tokens": False,
        "priority": 3, "cache_salt": "salt", "structured_outputs": {"regex": "one"},
    }  # fmt: skip
    async with serve(backend) as client:
        await client.chat(max_tokens=9, logprobs=True, top_logprobs=2, reasoning_effort="low", **fields)
        await respond(
            client, max_output_tokens=9, include=LOGPROBS, top_logprobs=2, reasoning={"effort": "low"}, **fields
        )
    chat, response = backend.requests
    assert (response.tokens, response.sampling) == (chat.tokens, chat.sampling)
    assert (response.priority, response.cache_salt) == (chat.priority, chat.cache_salt) == (3, "salt")


async def test_effort_and_variables_reach_the_template() -> None:
    backend = FakeBackend()
    template = "{{ reasoning_effort }}{{ colour }}"
    async with serve(backend, template=template) as client:
        await respond(client, reasoning={"effort": "low", "summary": "auto"}, chat_template_kwargs={"colour": "red"})
    assert TOKENIZER.decode(backend.requests[0].tokens) == "lowred"


async def test_a_prompt_that_is_too_long_is_cut_only_if_that_is_asked_for() -> None:
    backend = FakeBackend(max_model_len=64)
    async with serve(backend) as client:
        fields: dict[str, Any] = {"input": "one " * 100, "max_output_tokens": 4}
        status, error = await client.refused("/v1/responses", fields)
        assert (status, error["param"]) == (400, "input")
        assert "maximum context length is 64 tokens, but input has" in error["message"]
        await respond(client, truncation="auto", **fields)
    assert len(backend.requests[0].tokens) == 60


@pytest.mark.parametrize(
    ("wrong", "status"),
    [
        ({"input": "x" * 257}, 400),
        ({"max_output_tokens": 1000}, 400),
        ({"model": "no"}, 404),
        ({"temperature": -1}, 400),
        ({"text": {"format": {"type": "json_schema", "name": "x", "schema": {"type": "strng"}}}}, 400),
    ],
)
async def test_refusals_of_a_stream_have_their_status(wrong: dict[str, Any], status: int) -> None:
    """STR-10."""
    async with serve() as client:
        plain = await client.refused("/v1/responses", {"input": "hi"} | wrong)
        assert plain == await client.refused("/v1/responses", {"input": "hi", "stream": True} | wrong)
        assert plain[0] == status


async def test_several_tokens_may_come_in_an_event() -> None:
    async with serve(FakeBackend(says("one two three"))) as client:
        events = await stream(client, stream_interval=2)
    deltas = [event["delta"] for event in events if event["type"].endswith("delta")]
    assert deltas == ["one", " two three"]


# output


async def test_a_whole_answer() -> None:
    async with serve(FakeBackend(says("one two"))) as client:
        answer = await respond(
            client, metadata={"a": "b"}, user="u", instructions="x", store=True, service_tier="auto",
            prompt_cache_key="k", safety_identifier="s", max_tool_calls=3, max_output_tokens=9, temperature=0.5,
            top_p=0.25, parallel_tool_calls=False, text={"format": {"type": "json_object"}, "verbosity": "low"},
            reasoning={"effort": "low"}, tools=TOOLS, tool_choice="none", include=["reasoning.encrypted_content"],
            stream_options={"include_obfuscation": False}, background=False, previous_response_id=None,
        )  # fmt: skip
    (item,) = answer["output"]
    assert item["id"].startswith("msg_")
    assert answer["id"].startswith("resp_")
    assert without_ids(item) == {
        "type": "message", "role": "assistant", "status": "completed",
        "content": [{"type": "output_text", "text": "one two", "annotations": [], "logprobs": []}],
    }  # fmt: skip
    assert answer["usage"] == {
        "input_tokens": answer["usage"]["total_tokens"] - 3,
        "input_tokens_details": {"cached_tokens": 0, "cache_write_tokens": 0},
        "output_tokens": 3,
        "output_tokens_details": {"reasoning_tokens": 0},
        "total_tokens": answer["usage"]["total_tokens"],
    }
    expected = {
        "object": "response", "status": "completed", "error": None, "incomplete_details": None, "model": MODEL,
        "metadata": {"a": "b"}, "user": "u", "instructions": "x", "store": False, "service_tier": "auto",
        "prompt_cache_key": "k", "safety_identifier": "s", "max_tool_calls": 3, "max_output_tokens": 9,
        "temperature": 0.5, "top_p": 0.25, "parallel_tool_calls": False,
        "text": {"format": {"type": "json_object"}, "verbosity": "low"},
        "reasoning": {"effort": "low", "summary": None}, "tool_choice": "none", "truncation": "disabled",
        "background": False, "previous_response_id": None, "top_logprobs": 0,
    }  # fmt: skip
    assert {name: answer[name] for name in expected} == expected
    assert [tool["name"] for tool in answer["tools"]] == [tool["name"] for tool in TOOLS]
    assert answer["created_at"] <= answer["completed_at"]


async def test_the_events_of_a_text() -> None:
    backend = FakeBackend(says("one two"))
    backend.cached_tokens = 4
    async with serve(backend) as client:
        events = await stream(client)
    assert [event["type"].removeprefix("response.") for event in events] == [
        "created", "in_progress", "output_item.added", "content_part.added", "output_text.delta", "output_text.delta",
        "output_text.done", "content_part.done", "output_item.done", "completed",
    ]  # fmt: skip
    assert events[0]["response"]["status"] == events[1]["response"]["status"] == "in_progress"
    assert events[0]["response"]["usage"] is None
    assert events[2]["item"]["content"] == []
    assert events[2]["item"]["status"] == "in_progress"
    assert len({event["item_id"] for event in events[3:8]} | {events[2]["item"]["id"]}) == 1
    assert events[-1]["response"]["usage"]["input_tokens_details"]["cached_tokens"] == 4
    assert len({event["response"]["id"] for event in events if "response" in event}) == 1


async def test_the_first_events_do_not_wait_for_a_token() -> None:
    backend = FakeBackend()
    backend.pause_at = 0
    async with serve(backend) as client, client.post("/v1/responses", json={"input": "hi", "stream": True}) as response:
        assert (await response.content.readuntil(b"\n\n")).startswith(b"event: response.created\n")
        assert (await response.content.readuntil(b"\n\n")).startswith(b"event: response.in_progress\n")
        backend.go_on.set()
        assert b"response.completed" in await response.read()


@pytest.mark.parametrize("output", ["", OUTPUT, f"one{CALLS}", f"{OUTPUT}{CALLS}", CALLS, f"<think>\n{OUTPUT}"])
@pytest.mark.parametrize("limit", [None, 5, 14, 30, 60])
@pytest.mark.parametrize("burst", [1, 3, 100])
async def test_a_stream_ends_as_the_whole_answer(output: str, limit: int | None, burst: int) -> None:
    backend = scripted(output)
    backend.burst = burst
    settings: dict[str, Any] = {"template": HERMES + "{% if false %}</think>{% endif %}"}
    fields: dict[str, Any] = {"tools": TOOLS, "max_output_tokens": limit, "include": LOGPROBS}
    async with serve(backend, **settings) as client:
        answer = await respond(client, **fields)
        events = await stream(client, **fields)
    assert without_ids(events[-1]["response"]) == without_ids(answer)
    statuses = [item["status"] for item in answer["output"]]
    assert statuses[:-1] == ["completed"] * (len(statuses) - 1)
    if answer["status"] == "incomplete":
        assert (answer["incomplete_details"], statuses[-1]) == ({"reason": "max_output_tokens"}, "incomplete")
        assert events[-1]["type"] == "response.incomplete"
    else:
        assert (answer["incomplete_details"], statuses[-1]) == (None, "completed")


async def test_reasoning_a_text_and_calls_are_items_one_after_the_other() -> None:
    template = HERMES + "{% if false %}</think>{% endif %}"
    async with serve(scripted(OUTPUT + CALLS), template=template) as client:
        answer = await respond(client, tools=TOOLS, include=LOGPROBS)
        events = await stream(client, tools=TOOLS)
    thought, message, *calls = answer["output"]
    assert (thought["type"], thought["content"]) == ("reasoning", [{"type": "reasoning_text", "text": "Well."}])
    assert (thought["summary"], thought["id"][:3]) == ([], "rs_")
    assert message["content"][0]["text"] == "one two"
    assert "".join(entry["token"] for entry in message["content"][0]["logprobs"]).strip() == "one two"
    assert [(one["name"], json.loads(one["arguments"])) for one in calls] == [WEATHER, TIME]
    assert len({one["call_id"] for one in calls}) == len({one["id"] for one in calls}) == 2
    assert all(one["id"].startswith("fc_") for one in calls)
    assert answer["usage"]["output_tokens_details"]["reasoning_tokens"] > 0
    kinds = [event["type"].removeprefix("response.") for event in events]
    assert list(dict.fromkeys(kinds)) == [
        "created", "in_progress", "output_item.added", "content_part.added", "reasoning_text.delta",
        "reasoning_text.done", "content_part.done", "output_item.done", "output_text.delta", "output_text.done",
        "function_call_arguments.delta", "function_call_arguments.done", "completed",
    ]  # fmt: skip


async def test_only_the_first_call_is_kept_if_they_are_not_to_be_parallel() -> None:
    async with serve(scripted(CALLS), template=HERMES) as client:
        answer = await respond(client, tools=TOOLS, parallel_tool_calls=False)
    assert [item["name"] for item in answer["output"]] == [WEATHER.name]


async def test_an_answer_may_be_the_next_input() -> None:
    """What a client got, it may send back unchanged."""
    backend = scripted(OUTPUT + CALLS)
    template = HERMES + "{% if false %}</think>{% endif %}"
    async with serve(backend, template=template) as client:
        answer = await respond(client, tools=TOOLS)
        outputs = [output(item["call_id"]) for item in answer["output"] if item["type"] == "function_call"]
        user = {"role": "user", "content": "hi"}
        await respond(client, input=[user, *answer["output"], *outputs], tools=TOOLS)
        chat = chat_of(input=[user, *answer["output"], *outputs]).messages
    assert [message["role"] for message in chat] == ["user", "assistant", "tool", "tool"]
    assert "one two" in TOKENIZER.decode(backend.requests[1].tokens)


async def test_logprobs_have_as_many_alternatives_as_asked_for() -> None:
    async with serve(FakeBackend(says("one two"))) as client:
        answer = await respond(client, include=LOGPROBS, top_logprobs=3)
    logprobs = answer["output"][0]["content"][0]["logprobs"]
    assert [entry["token"] for entry in logprobs] == ["one", " two", "</s>"]
    assert [len(entry["top_logprobs"]) for entry in logprobs] == [3, 3, 3]
    assert answer["top_logprobs"] == 3


# failures


async def test_a_failure_is_the_last_event() -> None:
    backend = FakeBackend(says("one two"))
    backend.fail_at, backend.failure = 1, EngineFailure("the engine was lost")
    async with serve(backend) as client:
        events = await stream(client)
    last = events[-1]
    assert last["type"] == "response.failed"
    assert last["response"]["status"] == "failed"
    assert last["response"]["error"] == {"code": "server_error", "message": "the engine was lost"}
    backend.failure = InvalidRequest("no token is left")
    async with serve(backend) as client:
        events = await stream(client)
    assert events[-1]["response"]["error"]["code"] == "invalid_prompt"


@pytest.mark.parametrize("streams", [False, True])
async def test_ids_and_ignored_fields_are_in_the_headers(streams: bool) -> None:
    body = {"input": "hi", "stream": streams, "colour": 1}
    async with serve() as client:
        async with client.post("/v1/responses", json=body, headers={"X-Request-Id": "mine"}) as response:
            assert response.headers["X-Request-Id"] == "mine"
            assert response.headers["X-Quire-Ignored-Fields"] == "colour"
            assert "resp_mine" in await response.text()
        async with client.post("/v1/responses", json={"input": "hi", "request_id": "own"}) as response:
            assert (await response.json())["id"] == "resp_own"
    async with serve(api_key=["secret"]) as client:
        assert (await client.post("/v1/responses", json=body)).status == 401


async def test_errors_of_calls_and_messages_name_the_item() -> None:
    items = [{"role": "user", "content": "q"}, call("1"), call("2", "x"), output("1")]
    async with serve(template=CHATML) as client:
        status, error = await client.refused("/v1/responses", {"instructions": "x", "input": items})
    assert (status, error["param"]) == (400, "input[2].arguments")
    assert "input[2].arguments must be a JSON object" in error["message"]


async def test_the_reasoning_of_a_stream_is_cut_off_with_it() -> None:
    async with serve(FakeBackend(says(OUTPUT)), template=THINKING) as client:
        answer = await respond(client, max_output_tokens=10)
    (item,) = answer["output"]
    assert (item["type"], item["status"], answer["status"]) == ("reasoning", "incomplete", "incomplete")


@pytest.mark.parametrize(
    ("method", "rest"), [("GET", ""), ("DELETE", ""), ("GET", "/input_items"), ("POST", "/cancel")]
)
async def test_a_response_cannot_be_asked_for_later(method: str, rest: str) -> None:
    async with serve() as client:
        id = (await respond(client, store=True))["id"]
        async with client.request(method, f"/v1/responses/{id}{rest}") as response:
            error = await error_of(response)
        status, refused = await client.refused("/v1/responses", {"input": "hi", "previous_response_id": id})
    assert (response.status, error["type"], error["param"]) == (404, "NotFoundError", None)
    assert (status, refused["param"]) == (400, "previous_response_id")
