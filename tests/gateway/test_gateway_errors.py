"""A table of the errors of the API: what is asked, and the status, type, field and words of the answer.

A test checks that no place of `services/gateway` and `CHECKING` that raises `InvalidRequest` is left out, so a new one
needs a line here. Each line is asked for as a whole and as a stream, which must have the same status.
"""

import ast
import io
import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import pytest

import services.gateway
import shared.beam_params
import shared.params
import shared.text.bad_words
import shared.text.reasoning_limit
from services.gateway import completions, errors
from shared.errors import EngineFailure, InvalidRequest, Overloaded, Unavailable
from tests.gateway.fakes import EOS, VOCAB, FakeBackend, error_of, ids, says, serve
from tests.text.vocabulary import CHATML

COMPLETIONS, CHATS, RESPONSES = "/v1/completions", "/v1/chat/completions", "/v1/responses"
TOKENIZE, DETOKENIZE = "/tokenize", "/detokenize"
BEAMS = {"use_beam_search": True}
USER = {"role": "user", "content": "hi"}
TOOL = {"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}
WRONG_TOOL = {"type": "function", "function": {"name": "g", "parameters": {"required": 1}}}
SHOWS_TOOLS = CHATML + "{% if tools %}{{ tools[0].function.name }}{% endif %}"


GOOD: dict[str, dict[str, Any]] = {
    COMPLETIONS: {"prompt": "hi"},
    CHATS: {"messages": [USER]},
    RESPONSES: {"input": "hi"},
}


class Case(NamedTuple):
    """What is asked, and what the answer must have. `body` is added to a good request, or is one if it is bytes."""

    path: str
    body: dict[str, Any] | bytes
    param: str | None
    words: tuple[str, ...]  # of the message; the limit and the value are among them
    settings: dict[str, Any] = {}  # of the server
    status: int = 400
    headers: dict[str, str] = {}

    def data(self, stream: bool) -> io.BytesIO:
        if isinstance(self.body, bytes):
            return io.BytesIO(self.body)
        return io.BytesIO(json.dumps(GOOD[self.path] | {"stream": stream} | self.body).encode())


def both(body: dict[str, Any], param: str, *words: str, **settings: Any) -> list[Case]:
    """Return the case of each endpoint."""
    return [Case(path, body, param, words, settings) for path in (COMPLETIONS, CHATS)]


def chat(body: dict[str, Any], param: str | None, *words: str, **settings: Any) -> Case:
    return Case(CHATS, body, param, words, settings)


def completion(body: dict[str, Any], param: str | None, *words: str, **settings: Any) -> Case:
    return Case(COMPLETIONS, body, param, words, settings)


def response(body: dict[str, Any], param: str | None, *words: str, **settings: Any) -> Case:
    return Case(RESPONSES, body, param, words, settings)


def item(fields: dict[str, Any], param: str, *words: str) -> Case:
    """Return the case of an item of a response's input."""
    return response({"input": [USER, fields]}, param, *words)


def nested(value: str, count: int) -> bytes:
    return f'{{"prompt": "x", "unknown": [{value * count}1]}}'.encode()


CASES = [
    # bodies
    completion({}, None, "application/json", "text/plain")._replace(headers={"Content-Type": "text/plain"}),
    Case(COMPLETIONS, b"{", None, ("not JSON",)),
    Case(COMPLETIONS, b'{"prompt": "x", "logit_bias": ' + b'{"1":' * 5000 + b"1" + b"}" * 5001, None, ("nested",)),
    Case(COMPLETIONS, nested('"a",', 140_000), None, ("140003 strings", "131072")),
    Case(COMPLETIONS, nested("[],", 40_000), None, ("40002 lists", "32768", "1048576")),
    Case(COMPLETIONS, b" " * 1_100_000, None, ("1100000 bytes", "1048576"), {"max_body_size": 1}, 413),
    *both({"seed": "x"}, "seed", "int | float", "str"),
    completion({"prompt": None}, "prompt", "prompt"),
    chat({"messages": None}, "messages", "array"),
    Case(CHATS, b"{}", "messages", ("messages is missing",)),
    *both({"foo": 1}, "foo", "foo is not a field", strict_fields=True),
    *both({"suffix": "x"}, "suffix", "suffix is not supported"),
    *both({"logits_processors": ["x"]}, "logits_processors", "not supported"),
    *both({"prompt_embeds": "x"}, "prompt_embeds", "not supported"),
    # names and ids
    *[case._replace(status=404) for case in both({"model": "no"}, "model", "'no'", "tiny")],
    *both({"request_id": "x" * 129}, "request_id", "128", "'xxx"),
    *both({"request_id": "a\n"}, "request_id", "printable", "'a\\n'"),
    # combinations
    *both({"stream": None, "stream_options": {"include_usage": True}}, "stream_options", "needs stream"),
    *both({"stream": True, "prompt_logprobs": 1}, "prompt_logprobs", "stream"),
    chat({"top_logprobs": 1}, "top_logprobs", "needs logprobs"),
    chat({"logprob_token_ids": [5]}, "logprob_token_ids", "needs logprobs to be true"),
    completion({"logprob_token_ids": [5]}, "logprob_token_ids", "needs logprobs to be a number"),
    completion({"best_of": 3, "n": 2}, "best_of", "n, which is 2", "got 3"),
    chat({"continue_final_message": True}, "continue_final_message", "add_generation_prompt"),
    # ranges
    *both({"n": 0}, "n", "between 1 and 128", "got 0"),
    *both({"n": 1.5}, "n", "whole number", "1.5"),
    *both({"temperature": 3}, "temperature", "between 0.0 and 2.0", "got 3"),
    *both({"top_p": 0}, "top_p", "greater than 0 and at most 1", "got 0"),
    *both({"top_k": -2}, "top_k", "-1 or 0", "got -2"),
    *both({"min_p": 2}, "min_p", "between 0.0 and 1.0", "got 2"),
    *both({"seed": 2**63}, "seed", str(2**63 - 1), str(2**63)),
    *both({"min_tokens": 3, "max_tokens": 2}, "min_tokens", "max_tokens", "got 3"),
    *both({"min_tokens": 300}, "min_tokens", "must be at most max_tokens, which is", "got 300"),
    *both({"presence_penalty": 3}, "presence_penalty", "between -2.0 and 2.0", "got 3"),
    *both({"repetition_penalty": 0}, "repetition_penalty", "between 1e-30 and 1e+30", "got 0"),
    *both({"prompt_logprobs": 21, "stream": None}, "prompt_logprobs", "between 0 and 20", "got 21"),
    *both({"prompt_logprobs": -1, "stream": None}, "prompt_logprobs", "between 0 and 20", "got -1"),
    completion({"logprobs": -1}, "logprobs", "between 0 and 20", "got -1"),
    completion({"logprobs": 3}, "logprobs", "at most 2 (--max-logprobs)", "got 3", max_logprobs=2),
    chat({"logprobs": True, "top_logprobs": 3}, "top_logprobs", "at most 2", "got 3", max_logprobs=2),
    *both({"priority": 2**63}, "priority", "2**63", str(2**63)),
    *both({"thinking_token_budget": -2}, "thinking_token_budget", "between -1 and", "got -2"),
    *both({"thinking_token_budget": 5}, "thinking_token_budget", "not supported here", "--reasoning-parser"),
    *both(
        {"thinking_token_budget": 5}, "thinking_token_budget", "parser granite", "one token", reasoning_parser="granite"
    ),
    *both({"stream_interval": 0}, "stream_interval", "at least 1", "got 0"),
    *both({"truncate_prompt_tokens": -2}, "truncate_prompt_tokens", "-1 or between 1 and", "256", "got -2"),
    *both({"truncate_prompt_tokens": 9, "max_tokens": 250}, "truncate_prompt_tokens", "between 1 and 6", "got 9"),
    *both({"truncate_prompt_tokens": -1, "max_tokens": 256}, "max_tokens", "256", "no room"),
    *both({"truncation_side": "top"}, "truncation_side", "top"),
    *both(
        {"repetition_detection": {"max_pattern_size": 257, "min_count": 2}},
        "repetition_detection.max_pattern_size", "between 0 and 256", "got 257",
    ),
    *both(
        {"repetition_detection": {"max_pattern_size": 2, "min_count": 1}},
        "repetition_detection.min_count", "between 2 and", "got 1",
    ),
    *both(
        {"repetition_detection": {"max_pattern_size": 2, "min_pattern_size": 3, "min_count": 2}},
        "repetition_detection.min_pattern_size", "between 0 and 2", "got 3",
    ),
    completion({"logprobs": 20, "n": 128, "max_tokens": 200, "stream_interval": 200}, "logprobs", "537600", "500000"),
    chat(
        {"logprobs": True, "top_logprobs": 20, "n": 128, "max_tokens": 200, "stream_interval": 200},
        "top_logprobs", "537600", "500000",
    ),
    # beam searches
    *both(BEAMS | {"n": 3, "best_of": 2}, "best_of", "n, which is 3", "got 2"),
    *both({"length_penalty": 2}, "length_penalty", "needs use_beam_search", "got 2"),
    *both(BEAMS | {"length_penalty": 11}, "length_penalty", "between -10.0 and 10.0", "got 11"),
    *both(BEAMS | {"n": 33}, "n", "between 1 and 32", "got 33"),
    *both(BEAMS | {"best_of": 33}, "best_of", "between 1 and 32", "got 33"),
    *both(BEAMS | {"temperature": 0.5}, "temperature", "0 or 1", "got 0.5"),
    *both(BEAMS | {"stop": "x"}, "stop", "not supported in a beam search", "'x'"),
    *both(BEAMS | {"response_format": {"type": "json_object"}}, "use_beam_search", "structured output"),
    *both(BEAMS | {"max_tokens": 0}, "max_tokens", "at least 1", "got 0"),
    *both(BEAMS | {"n": 20, "max_tokens": 100}, "max_tokens", "20 beams", "100 of output", "at most 2000"),
    *both(BEAMS | {"n": 32, "max_tokens": 1, "stop_token_ids": [*range(40)]}, "stop_token_ids", "at most 64", "got 7"),
    # lists
    *both({"allowed_token_ids": []}, "allowed_token_ids", "empty"),
    *both({"allowed_token_ids": [1] * 262_145}, "allowed_token_ids", "at most 262144 token ids", "got 262145"),
    *both({"allowed_token_ids": [VOCAB]}, "allowed_token_ids", f"0 to {VOCAB - 1}", f"got {VOCAB}"),
    *both({"allowed_token_ids": ids("one"), "bad_words": ["one"]}, "bad_words", "all of allowed_token_ids"),
    *both({"allowed_token_ids": [EOS], "min_tokens": 1}, "min_tokens", "all of allowed_token_ids"),
    *both({"bad_words": ["x"] * 129}, "bad_words", "at most 128 words", "got 129"),
    *both({"bad_words": [""]}, "bad_words", "empty string"),
    *both({"bad_words": ["x" * 257]}, "bad_words", "at most 256 characters", "got 257"),
    *both({"bad_words": [f"x{at}" for at in range(128)]}, "bad_words", "at most 128 sequences", "got 256"),
    *both({"bad_words": ["x" * 256]}, "bad_words", "at most 64 tokens", "has 25"),
    *both({"cache_salt": ""}, "cache_salt", "1 to 128 characters", "''"),
    *both({"cache_salt": "x" * 129}, "cache_salt", "1 to 128 characters", "'xxx"),
    *both({"stop": ["a"] * 5}, "stop", "at most 4 strings", "got 5"),
    *both({"stop": [""]}, "stop", "empty string"),
    *both({"stop": "a" * 1025}, "stop", "at most 1024 characters", "got 1025"),
    *both({"stop_token_ids": [1] * 1025}, "stop_token_ids", "at most 1024 token ids", "got 1025"),
    *both({"stop_token_ids": [VOCAB]}, "stop_token_ids", f"0 to {VOCAB - 1}", f"got {VOCAB}"),
    *both({"logit_bias": {str(at): 1 for at in range(16_385)}}, "logit_bias", "at most 16384 tokens", "got 16385"),
    *both({"logit_bias": {"5": 101}}, "logit_bias", "between -100 and 100", "'5'", "got 101"),
    *both({"logit_bias": {"5": "x"}}, "logit_bias", "must be a number", "'5'"),
    *both({"logit_bias": {"x": 1}}, "logit_bias", f"0 to {VOCAB - 1}", "'x'"),
    # lengths
    *both({"max_tokens": -1}, "max_tokens", "0", "got -1"),
    chat({"max_completion_tokens": 2**63}, "max_completion_tokens", "2**63 - 1", str(2**63)),
    completion({"prompt": [7] * 9, "max_tokens": 250}, "max_tokens", "256", "9", "250"),
    completion({"prompt": [7] * 257}, "prompt", "256", "257"),
    completion({"prompt": "x" * 100_000}, "prompt", "256 tokens", "100000"),
    completion({"prompt": []}, "prompt", "empty"),
    completion({"prompt": ""}, "prompt", "no tokens"),
    completion({"prompt": [["x"], [1]]}, "prompt[0][0]", "int"),
    completion({"prompt": ["x", 1]}, "prompt", "int and str"),
    completion({"prompt": [VOCAB]}, "prompt", str(VOCAB), f"0 to {VOCAB - 1}"),
    completion({"prompt": ["x"] * 1025}, "prompt", "1024", "1025"),
    completion({"prompt": ["x"] * 9, "n": 128}, "prompt", "1024", "1152"),
    completion({"prompt": ["x"] * 70, "stop_token_ids": [5] * 1000}, "prompt", "65536", "70 times 1000"),
    completion({"prompt_logprobs": 20, "n": 128, "prompt": [7] * 200, "stream": None}, "prompt_logprobs", "537600"),
    completion({"echo": True, "n": 128, "prompt": "x" * 200}, "echo", "200 characters", "128 choices", "20000"),
    completion({"prompt": "\ud800"}, None, "not JSON"),
    chat({"messages": []}, "messages", "empty"),
    chat({"messages": [USER] * 257}, "messages", "256 tokens", "257 messages"),
    chat({}, "messages", "256 tokens", "the prompt has 256", template="{{ 'one' * 256 }}"),
    chat(
        {"messages": [USER | {"content": "</s>" * 4097}]},
        "messages", "4097", "4096", special_tokens_in_messages="text",
    ),
    chat({}, "messages", "surrogate", template="{{ '\\ud800' }}"),
    # messages and templates
    chat({"messages": [USER | {"content": 7}]}, "messages[0].content", "string or a list"),
    chat({}, "messages", "no chat template", template=None),
    chat({"chat_template_kwargs": {"messages": 1}}, "chat_template_kwargs", "messages"),
    chat({"chat_template_kwargs": {"chat_template": "x"}}, "chat_template_kwargs", "chat_template"),
    chat({"chat_template": "x"}, "chat_template", "--trust-request-chat-template"),
    chat({"chat_template": "x" * 131_073}, "chat_template", "131072", "131073", trust_request_chat_template=True),
    chat(
        {"chat_template": "x"}, "chat_template", "--special-tokens-in-messages text",
        trust_request_chat_template=True, special_tokens_in_messages="text",
    ),
    chat({"chat_template": "{% if %}"}, "chat_template", "line 1", trust_request_chat_template=True),
    # tools
    chat({"tools": [{}]}, "tools[0]", "'function'"),
    chat({"tools": [{"type": "function"}]}, "tools[0].function", "object"),
    chat({"tools": [{"type": "function", "function": {"name": "a b"}}]}, "tools[0].function.name", "'a b'"),
    chat({"tools": [TOOL, TOOL]}, "tools[1].function.name", "two tools"),
    chat(
        {"tools": [{"type": "function", "function": {"name": "f", "strict": 1}}]},
        "tools[0].function.strict", "true or false",
    ),
    chat({"tool_choice": "x"}, "tool_choice", "'required'", "'x'"),
    chat(
        {"tools": [TOOL, WRONG_TOOL], "tool_choice": "required"}, "tools[1].function.parameters", "'required'", "got 1",
        template=SHOWS_TOOLS, tool_call_parser="hermes",
    ),
    chat({"tool_choice": "required"}, "tool_choice", "needs tools"),
    chat({"tools": [TOOL], "tool_choice": {"type": "function", "function": {"name": "g"}}}, "tool_choice", "'g'"),
    chat({"tools": [TOOL]}, "tools", "--chat-template"),
    chat({"tools": [TOOL]}, "tools", "--tool-call-parser", template=SHOWS_TOOLS),
    chat(
        {"tools": [TOOL], "tool_choice": "required"},
        "tool_choice", "--tool-call-parser", template=SHOWS_TOOLS, tool_call_parser="none",
    ),
    # forms
    *both({"guided_json": {}, "guided_regex": "x"}, "guided_regex", "only one"),
    *both({"guided_whitespace_pattern": " "}, "guided_whitespace_pattern", "needs guided_json"),
    *both({"response_format": {"type": "x"}}, "response_format.type", "'json_object'", "'x'"),
    *both({"response_format": {"type": "json_schema"}}, "response_format.json_schema", "object", "None"),
    *both(
        {"response_format": {"type": "json_schema", "json_schema": {}}}, "response_format.json_schema.name", "None"
    ),
    *both(
        {"response_format": {"type": "json_schema", "json_schema": {"name": "x", "schema": 1}}},
        "response_format.json_schema.schema", "1",
    ),
    *both({"structured_outputs": {}}, "structured_outputs", "exactly one", "none"),
    *both({"structured_outputs": {"json": {}, "bar": 1}}, "structured_outputs", "bar"),
    # responses
    response({"input": []}, "input", "empty"),
    response({"input": ""}, "input", "empty"),
    Case(RESPONSES, b"{}", "input", ("input is missing",)),
    response({"model": "no"}, "model", "'no'", "tiny")._replace(status=404),
    response({"request_id": "a\n"}, "request_id", "printable", "'a\\n'"),
    response({"input": "x " * 300}, "input", "256 tokens", "input has"),
    response({"background": True}, "background", "not supported", "answered at once"),
    response({"conversation": "conv_1"}, "conversation", "not supported", "not kept"),
    response({"previous_response_id": "resp_1"}, "previous_response_id", "not supported", "not kept"),
    response({"prompt": {"id": "pmpt_1"}}, "prompt", "not supported", "no stored prompts"),
    response({"max_tool_calls": 1.5}, "max_tool_calls", "whole number", "1.5"),
    response({"include": ["x"]}, "include", "'x'", "not supported"),
    response({"top_logprobs": 2}, "top_logprobs", "needs include", "message.output_text.logprobs"),
    response({"logprob_token_ids": [5]}, "logprob_token_ids", "needs include", "message.output_text.logprobs"),
    response({"max_output_tokens": -1}, "max_output_tokens", "max_output_tokens must be between", "got -1"),
    response({"max_output_tokens": 256}, "max_output_tokens", "256", "max_output_tokens is 256"),
    response({"min_tokens": 300}, "min_tokens", "must be at most max_output_tokens", "got 300"),
    response({"temperature": 3}, "temperature", "between 0.0 and 2.0", "got 3"),
    response({"reasoning": {"effort": "x"}}, "reasoning.effort", "'minimal'", "'x'"),
    response({"text": {"format": {"type": "x"}}}, "text.format.type", "'json_schema'", "'x'"),
    response({"text": {"format": {"type": "json_schema"}}}, "text.format.name", "text.format.name", "None"),
    response(
        {"text": {"format": {"type": "json_schema", "name": "x", "schema": 1}}}, "text.format.schema", "JSON schema"
    ),
    response({"tools": [{"type": "web_search"}]}, "tools[0]", "'web_search'", "'function'"),
    response({"tools": [{"type": "function", "name": "a b"}]}, "tools[0].name", "tools[0].name must", "'a b'"),
    response({"tool_choice": {"type": "mcp"}}, "tool_choice", "'mcp'", "'allowed_tools'"),
    response({"tool_choice": {"type": "function", "name": "f"}}, "tool_choice", "needs tools"),
    *[
        response(
            {"tools": [{"type": "function", "name": "f"}], "tool_choice": {"type": "allowed_tools", **choice}},
            param, word,
        )
        for choice, param, word in (
            ({"mode": "x"}, "tool_choice.mode", "'x'"),
            ({"mode": "auto"}, "tool_choice.tools", "list"),
            ({"mode": "auto", "tools": [{"type": "mcp"}]}, "tool_choice.tools[0]", "'mcp'"),
            ({"mode": "auto", "tools": [{"type": "function"}]}, "tool_choice.tools[0].name", "string"),
            ({"mode": "auto", "tools": [{"type": "function", "name": "g"}]}, "tool_choice.tools[0]", "'g'"),
        )
    ],
    item({"type": "item_reference", "id": "msg_1"}, "input[1]", "item_reference", "store false"),
    item({"type": "computer_call"}, "input[1]", "'computer_call'", "'function_call_output'"),
    item({}, "input[1]", "None"),
    item({"role": "tool", "content": "x"}, "input[1].role", "'developer'", "'tool'"),
    item({"role": "user"}, "input[1].content", "string or a list"),
    item(
        {"role": "user", "content": [{"type": "input_image", "image_url": "x"}]},
        "input[1].content[0]", "'input_image'", "only text",
    ),
    item({"role": "user", "content": [{"type": "input_text"}]}, "input[1].content[0].text", "string"),
    item({"type": "reasoning", "content": [1]}, "input[1].content", "list of parts"),
    item({"type": "function_call", "name": "f", "arguments": ""}, "input[1].call_id", "string"),
    item({"type": "function_call_output", "call_id": "x", "output": "y"}, "input[1].call_id", "'x' is of no"),
    item(
        {"type": "function_call", "call_id": "x", "name": "f", "arguments": "{"}, "input[1].arguments", "JSON object"
    ),
    response({}, "input", "no chat template", template=None),
    # prompts that are only tokenized
    Case(TOKENIZE, b'{"prompt": "x", "messages": []}', "prompt", ("messages", "prompt")),
    Case(TOKENIZE, json.dumps({"prompt": "x" * 1001}).encode(), "prompt", ("1000 tokens", "1001")),
    Case(DETOKENIZE, json.dumps({"tokens": [VOCAB]}).encode(), "tokens", (str(VOCAB), f"0 to {VOCAB - 1}")),
    Case(DETOKENIZE, json.dumps({"tokens": ids("one") * 400}).encode(), "tokens", ("at most 1000 bytes", "have 1")),
]  # fmt: skip

CHECKING = (shared.beam_params, shared.params, shared.text.bad_words, shared.text.reasoning_limit)
"""Modules outside the gateway that check requests."""

UNREACHABLE = {
    "adapters.py": "adapters that are loaded at run time: tests/gateway/test_gateway_adapters.py",
    "cors.py": "preflights, which browsers send and do not show: tests/gateway/test_gateway_cors.py",
}
"""Files whose errors have tests of their own."""

UNREACHABLE_FUNCTIONS = {
    ("backend.py", "_check_answers"): "an engine's answers about adapters: tests/gateway/test_gateway_adapters.py",
    ("beam_params.py", "__post_init__"): "the parameters of quire.LLM: tests/shared/test_beam_search.py",
    ("engine_connection.py", "_to_error"): "an engine's refusals: tests/gateway/test_gateway_backend.py",
    ("generation.py", "_check_end"): "an engine's errors: tests/gateway/test_gateway_structured_outputs.py",
}


def type_of(status: int) -> str:
    return {400: "BadRequestError", 404: "NotFoundError", 413: "RequestTooLargeError"}[status]


@pytest.fixture(autouse=True)
def small_limits(monkeypatch: pytest.MonkeyPatch) -> None:
    """Make limits that only long requests exceed small."""
    monkeypatch.setattr("services.gateway.bounds.MAX_REPEATED", 20_000)
    monkeypatch.setattr("services.gateway.prompt.MAX_TOKENS", 1000)
    monkeypatch.setattr("services.gateway.tokenization.MAX_TEXT", 1000)
    monkeypatch.setattr("services.gateway.stream.MAX_LOGPROBS_AT_ONCE", 500_000)
    monkeypatch.setattr("shared.beam_params.MAX_BEAM_TOKENS", 2000)
    monkeypatch.setattr(completions, "MAX_PROMPT_LOGPROBS", 500_000)


@pytest.mark.parametrize("stream", [False, True])
async def test_each_error_says_what_is_wrong_where_and_which_limit_holds(stream: bool) -> None:
    wrong = []
    for case in CASES:
        backend = FakeBackend()
        headers = {"Content-Type": "application/json"} | case.headers
        async with (
            serve(backend, **case.settings) as client,
            client.post(case.path, data=case.data(stream), headers=headers) as response,
        ):
            error = await error_of(response)
        assert len(error["message"]) <= 500
        found = (response.status, error["type"], error["param"])
        has_words = all(word in error["message"] for word in case.words)
        if found != (case.status, type_of(case.status), case.param) or not has_words or backend.requests:
            wrong.append((case.path, case.words, error))
    assert not wrong, "an error that is as the table has it, and is answered before an engine gets the request"


def raises_in(path: Path) -> Iterator[tuple[str, range]]:
    """Yield the function and the lines of each statement in a file that raises `InvalidRequest`."""
    for function in ast.walk(ast.parse(path.read_text())):
        if isinstance(function, (ast.FunctionDef, ast.AsyncFunctionDef)):
            for node in ast.walk(function):
                made = node.exc if isinstance(node, ast.Raise) else node.value if isinstance(node, ast.Return) else None
                if isinstance(made, ast.Call) and ast.unparse(made.func) in ("InvalidRequest", "UnknownModel"):
                    assert node.end_lineno is not None
                    yield function.name, range(node.lineno, node.end_lineno + 1)


async def test_no_error_is_left_out_of_the_table(monkeypatch: pytest.MonkeyPatch) -> None:
    """A line that raises `InvalidRequest` is in the table if one of its cases gets there."""
    reached: set[tuple[str, int]] = set()
    make = InvalidRequest.__init__

    def note(self: InvalidRequest, message: str, param: str | None = None) -> None:
        frame = sys._getframe(1)
        reached.add((frame.f_code.co_filename, frame.f_lineno))
        make(self, message, param)

    monkeypatch.setattr(InvalidRequest, "__init__", note)
    for case in CASES:
        headers = {"Content-Type": "application/json"} | case.headers
        async with (
            serve(**case.settings) as client,
            client.post(case.path, data=case.data(False), headers=headers) as response,
        ):
            await response.read()
    async with serve() as client, client.get("/health?engines=x") as response:
        await response.read()
    folder = Path(services.gateway.__file__ or "").parent
    missing = [
        f"{path.name}:{lines.start} in {function}"
        for path in (*folder.glob("*.py"), *(Path(module.__file__ or "") for module in CHECKING))
        for function, lines in raises_in(path)
        if path.name not in UNREACHABLE and (path.name, function) not in UNREACHABLE_FUNCTIONS
        if not any((str(path), line) in reached for line in lines)
    ]
    assert not missing


@pytest.mark.parametrize(
    ("query", "words"), [("x", ("9 digits", "'x'")), ("1" * 10, ("9 digits", "1111111111")), ("-1", ("'-1'",))]
)
async def test_the_query_of_health_is_checked(query: str, words: tuple[str, ...]) -> None:
    async with serve() as client, client.get(f"/health?engines={query}") as response:
        error = await error_of(response)
    assert (response.status, error["param"]) == (400, "engines")
    assert all(word in error["message"] for word in words)


ENGINES = [
    (Overloaded("128 of 128 requests wait", 2.3), 429, "RateLimitError", "128 of 128", "3"),
    (Unavailable("no engine was ready for 60 s"), 503, "ServiceUnavailableError", "60 s", "1"),
    (EngineFailure("the engine was lost"), 500, "InternalServerError", "the engine was lost", None),
    (RuntimeError("a bug"), 500, "InternalServerError", "the server's log", None),
    (ExceptionGroup("", [Overloaded("full", 0.1), EngineFailure("x")]), 429, "RateLimitError", "full", "1"),
]


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("path", [COMPLETIONS, CHATS, RESPONSES])
@pytest.mark.parametrize(("failure", "status", "kind", "words", "retry_after"), ENGINES)
async def test_what_an_engine_answers_is_a_status_before_a_stream_begins(
    path: str, stream: bool, failure: Exception, status: int, kind: str, words: str, retry_after: str | None
) -> None:
    backend = FakeBackend()
    backend.refusal = failure
    case = Case(path, {}, None, ())
    async with (
        serve(backend) as client,
        client.post(path, data=case.data(stream), headers={"Content-Type": "application/json"}) as response,
    ):
        error = await error_of(response)
    assert (response.status, error["type"], error["param"]) == (status, kind, None)
    assert words in error["message"]
    assert response.headers.get("Retry-After") == retry_after


@pytest.mark.parametrize(("failure", "status", "kind", "words", "_"), ENGINES)
async def test_a_later_failure_is_an_event_of_the_same_shape(
    failure: Exception, status: int, kind: str, words: str, _: Any
) -> None:
    backend = FakeBackend(says("one two"))
    backend.fail_at, backend.failure = 1, failure
    async with serve(backend) as client:
        *_, last = await client.stream_completion(prompt="hi")
    assert set(last) == {"error"}
    error = last["error"]
    assert (error["code"], error["type"], error["param"]) == (status, kind, None)
    assert words in error["message"]


def test_every_status_has_a_type() -> None:
    assert set(errors.TYPES) >= {case.status for case in CASES} | {status for _, status, *_ in ENGINES}
