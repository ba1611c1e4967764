"""Tests how the client turns a stream into an outcome: its pieces, their times, and whether the stream is whole."""

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from quire.bench.client import Outcome, Stream, Target, error_message, one_line, payload
from quire.bench.lines import Lines
from quire.bench.workload import Request


def event(**fields: Any) -> bytes:
    return b"data: " + json.dumps({"id": "x", "object": "y"} | fields).encode() + b"\n\n"


def text(said: str, finish: str | None = None) -> bytes:
    return event(choices=[{"index": 0, "text": said, "finish_reason": finish, "logprobs": None}])


def delta(finish: str | None = None, **fields: Any) -> bytes:
    return event(choices=[{"index": 0, "delta": fields, "finish_reason": finish}])


USAGE = event(choices=[], usage={"prompt_tokens": 9, "completion_tokens": 5, "total_tokens": 14})
DONE = b"data: [DONE]\n\n"


def take(*parts: tuple[float, bytes], content_type: str = "text/event-stream") -> Outcome:
    """Return the outcome of a request that was sent at second 10 and got these bytes at these times."""
    outcome = Outcome(7, started=10.0)
    stream = Stream(outcome)
    for now, data in parts:
        stream.feed(data, now)
    stream.end(content_type)
    return outcome


def test_times_are_those_of_the_bytes() -> None:
    result = take((10.5, text("a")), (11.0, text("b") + text("c")), (12.0, text("d", "length")), (15.0, USAGE + DONE))
    assert (result.ok, result.error, result.text) == (True, "", "abcd")
    assert (result.ttft, result.itls, result.latency) == (0.5, [0.5, 0.0, 1.0], 2.0)
    assert (result.prompt_len, result.output_tokens) == (9, 5)


def test_a_chats_role_is_no_token_wherever_it_comes() -> None:
    role = delta(role="assistant", content="")
    result = take((10.1, role), (10.5, delta(content="a")), (11.0, delta("stop")), (11.0, DONE))
    assert (result.ok, result.text, result.ttft, result.itls) == (True, "a", 0.5, [0.5])
    together = take((10.5, delta(role="assistant", content="a")), (11.0, delta("stop", content="b")))
    assert (together.ok, together.text, together.ttft, together.itls) == (True, "ab", 0.5, [0.5])


CALL = [{"index": 0, "id": "c", "type": "function", "function": {"name": "f", "arguments": ""}}]


@pytest.mark.parametrize(
    ("first", "aside"),
    [
        ({"reasoning": "hm"}, "hm"),
        ({"reasoning_content": "hm"}, "hm"),
        ({"role": "assistant", "content": "", "reasoning_content": "hm"}, "hm"),
        ({"role": "assistant", "content": None, "reasoning": "hm", "reasoning_content": "hm"}, "hm"),
        ({"tool_calls": CALL}, "f"),
        ({"tool_calls": [{"index": 0, "function": {"arguments": "{"}}]}, "{"),
        ({"function_call": {"name": "f"}}, "f"),
        ({"refusal": "no"}, "no"),
    ],
)
def test_words_beside_the_answer_are_tokens(first: dict[str, Any], aside: str) -> None:
    """BEN-01: a model that thinks first answers when it begins to think."""
    opening, text = delta(role="assistant", content=""), delta("stop", content="a")
    result = take((10.1, opening), (10.5, delta(**first)), (11.0, text), (11.0, DONE))
    assert (result.ok, result.text, result.other_text) == (True, "a", aside)
    assert (result.ttft, result.itls, result.latency) == (0.5, [0.5], 1.0)


@pytest.mark.parametrize(
    "empty",
    [
        {"content": ""},
        {"content": None},
        {},
        {"role": "assistant"},
        {"content": "", "reasoning": "", "reasoning_content": None, "tool_calls": []},
        {"content": [], "refusal": None},
        {"tool_calls": [{"index": 0, "function": {"name": None, "arguments": ""}}, None]},
    ],
)
def test_a_chats_chunk_without_words_is_no_token_wherever_it_comes(empty: dict[str, Any]) -> None:
    """BEN-01."""
    nothing = delta(**empty)
    result = take(
        (10.1, nothing),
        (10.3, nothing),
        (10.5, delta(content="a")),
        (10.7, nothing),
        (11.0, delta("stop", content="b")),
    )
    assert (result.ok, result.text, result.ttft, result.itls, result.latency) == (True, "ab", 0.5, [0.5], 1.0)
    stream = Stream(Outcome(7))
    assert not stream.feed(nothing, 11.0), "it puts off no limit on the time without a token"


def test_the_end_of_an_answer_is_a_piece_even_if_it_has_no_words() -> None:
    """BEN-01: a model may end at once, or say nothing but hidden tokens."""
    result = take((10.1, delta(role="assistant", content="")), (10.5, delta("stop")), (10.6, USAGE + DONE))
    assert (result.ok, result.ttft, result.itls, result.output_tokens) == (True, 0.5, [], 5)


def test_content_in_parts_and_an_empty_reason_to_finish_are_read() -> None:
    """BEN-01: some servers send them."""
    parts = [{"type": "thinking", "thinking": [{"type": "text", "text": "hm"}]}, {"type": "text", "text": "a"}]
    result = take((10.5, delta("", content=parts)), (11.0, delta("stop", content="b")), (11.0, DONE))
    assert (result.ok, result.text, result.ttft, result.itls) == (True, "hmab", 0.5, [0.5])
    assert take((10.5, delta("", content="a"))).error == "the stream broke off"


def test_a_completions_token_without_text_is_a_piece() -> None:
    result = take((10.5, text("")), (11.0, text("b", "stop")), (11.0, DONE))
    assert (result.ttft, result.itls, result.output_tokens) == (0.5, [0.5], 0)


@pytest.mark.parametrize(
    ("parts", "error"),
    [
        ([], "the stream held no token"),
        ([USAGE, DONE], "the stream held no token"),
        ([text("a")], "the stream broke off"),
        ([text("a"), event(error={"message": "the engine is gone", "code": 500}), DONE], "the engine is gone"),
        ([event(error="plain"), DONE], "plain"),
    ],
)
def test_a_stream_that_is_not_whole_has_failed(parts: list[bytes], error: str) -> None:
    result = take(*((11.0, part) for part in parts))
    assert (result.ok, result.error) == (False, error)


@given(st.lists(st.integers(0, 600), max_size=12), st.sampled_from([b"\n", b"\r\n", b"\r"]))
def test_bytes_may_be_cut_anywhere(cuts: list[int], end: bytes) -> None:
    whole = b": a comment\n\nevent: x\n" + text("aé") + b": ping\n\n" + text("b", "stop") + USAGE + DONE
    whole = whole.replace(b"\n", end)
    ends = sorted({min(cut, len(whole)) for cut in cuts} | {len(whole)})
    pieces = [whole[begin:end] for begin, end in zip([0, *ends[:-1]], ends, strict=True)]
    result = take(*((11.0, piece) for piece in pieces))
    assert (result.ok, result.text, len(result.itls), result.output_tokens) == (True, "aéb", 1, 5)


def test_what_is_sent() -> None:
    target = Target("http://x", False, "m", {}, {"temperature": 0, "ignore_eos": True}, 1.0)
    usage = {"stream": True, "stream_options": {"include_usage": True}}
    asked = {"model": "m", "prompt": [1, 2], "max_tokens": 3, "temperature": 0, "ignore_eos": True}
    assert payload(target, Request([1, 2], 2, 3)) == asked | usage
    chat = payload(target._replace(chat=True, body={}), Request("hi", 1, 3))
    message = {"role": "user", "content": "hi"}
    assert chat == {"model": "m", "messages": [message], "max_completion_tokens": 3} | usage


def test_what_a_refusal_says() -> None:
    assert error_message(b'{"error": {"message": "too long"}}') == "too long"
    assert error_message(b'{"error": "no"}') == "no"
    assert error_message(b"<html>\xff") == "<html>\ufffd"
    assert error_message(b'{"error": {"message": "too\\nlong"}}') == "too long"
    assert error_message(b"[" * 100_000) == "[" * 500, "too deep to be read"
    assert one_line("a\n\tb\x1b[31m c") == "a b [31m c"
    assert error_message(b"[]") == "[]"


def test_only_a_token_is_told_of_and_done_is_the_end() -> None:
    stream = Stream(Outcome(7))
    assert [stream.feed(data, 11.0) for data in (b": ping\n\n", text("a"), text("b"), USAGE)] == [
        False,
        True,
        True,
        False,
    ]
    assert not stream.done
    assert (stream.feed(DONE, 11.0), stream.done) == (False, True)


@pytest.mark.parametrize("count", ["-3", "1" + "0" * 23])
def test_a_number_of_tokens_that_cannot_be_is_refused(count: str) -> None:
    with pytest.raises(ValueError, match="Expected `int"):
        take((11.0, text("a") + b'data: {"usage": {"completion_tokens": ' + count.encode() + b"}}\n\n"))


def test_an_answer_that_is_no_stream_is_shown() -> None:
    result = take((11.0, b"<html>\n<body>Log in"), (11.0, b" first</body>"), content_type="text/html")
    assert result.error == "not a stream but a response of type text/html: <html> <body>Log in first</body>"
    result = take((11.0, b'{"error": "no such model"}'), content_type="application/json")
    assert result.error == "not a stream but a response of type application/json: no such model"
    assert take((11.0, text("a", "stop") + DONE), content_type="text/plain").ok, "what it is called does not matter"


def test_a_line_without_an_end_is_cut_off() -> None:
    lines = Lines(max_length=10)
    assert lines.feed(b"12345\n12345") == [b"12345"]
    assert lines.feed(b"67890\r") == [b"1234567890"]
    assert lines.feed(b"\n1234567890") == []
    with pytest.raises(ValueError, match="a line of more than 10 bytes"):
        lines.feed(b"x")
