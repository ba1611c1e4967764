"""One stream into an outcome: what counts as a piece, when it came, and when a stream is not whole."""

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from quire.bench.client import Outcome, Stream, Target, payload, said
from quire.bench.workload import Request


def event(**fields: Any) -> bytes:
    return b"data: " + json.dumps({"id": "x", "object": "y"} | fields).encode() + b"\n\n"


def text(said: str, finish: str | None = None) -> bytes:
    return event(choices=[{"index": 0, "text": said, "finish_reason": finish, "logprobs": None}])


def delta(finish: str | None = None, **fields: Any) -> bytes:
    return event(choices=[{"index": 0, "delta": fields, "finish_reason": finish}])


USAGE = event(choices=[], usage={"prompt_tokens": 9, "completion_tokens": 5, "total_tokens": 14})
DONE = b"data: [DONE]\n\n"


def take(*parts: tuple[float, bytes]) -> Outcome:
    """What becomes of bytes that come at these times, of a request sent at second 10."""
    outcome = Outcome(7, started=10.0)
    stream = Stream(outcome)
    for now, data in parts:
        stream.feed(data, now)
    stream.end()
    return outcome


def test_times_are_those_of_the_bytes() -> None:
    found = take((10.5, text("a")), (11.0, text("b") + text("c")), (12.0, text("d", "length")), (15.0, USAGE + DONE))
    assert (found.ok, found.error, found.text) == (True, "", "abcd")
    assert (found.ttft, found.itls, found.latency) == (0.5, [0.5, 0.0, 1.0], 2.0)
    assert (found.prompt_len, found.output_tokens) == (9, 5)


def test_a_chats_role_is_no_token_wherever_it_comes() -> None:
    role = delta(role="assistant", content="")
    found = take((10.1, role), (10.5, delta(content="a")), (11.0, delta("stop")), (11.0, DONE))
    assert (found.ok, found.text, found.ttft, found.itls) == (True, "a", 0.5, [0.5])
    together = take((10.5, delta(role="assistant", content="a")), (11.0, delta("stop", content="b")))
    assert (together.ok, together.text, together.ttft, together.itls) == (True, "ab", 0.5, [0.5])


def test_a_token_without_text_is_a_piece() -> None:
    found = take((10.5, text("")), (11.0, text("b", "stop")), (11.0, DONE))
    assert (found.ttft, found.itls, found.output_tokens) == (0.5, [0.5], 0)


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
    found = take(*((11.0, part) for part in parts))
    assert (found.ok, found.error) == (False, error)


@given(st.lists(st.integers(0, 600), max_size=12), st.booleans())
def test_bytes_may_be_cut_anywhere(cuts: list[int], windows: bool) -> None:
    whole = b": a comment\n\nevent: x\n" + text("aé") + b": ping\n\n" + text("b", "stop") + USAGE + DONE
    whole = whole.replace(b"\n", b"\r\n") if windows else whole
    ends = sorted({min(cut, len(whole)) for cut in cuts} | {len(whole)})
    pieces = [whole[begin:end] for begin, end in zip([0, *ends[:-1]], ends, strict=True)]
    found = take(*((11.0, piece) for piece in pieces))
    assert (found.ok, found.text, len(found.itls), found.output_tokens) == (True, "aéb", 1, 5)


def test_what_is_sent() -> None:
    target = Target("http://x", False, "m", {}, {"temperature": 0, "ignore_eos": True})
    usage = {"stream": True, "stream_options": {"include_usage": True}}
    asked = {"model": "m", "prompt": [1, 2], "max_tokens": 3, "temperature": 0, "ignore_eos": True}
    assert payload(target, Request([1, 2], 2, 3)) == asked | usage
    chat = payload(target._replace(chat=True, body={}), Request("hi", 1, 3))
    message = {"role": "user", "content": "hi"}
    assert chat == {"model": "m", "messages": [message], "max_completion_tokens": 3} | usage


def test_what_a_refusal_says() -> None:
    assert said(b'{"error": {"message": "too long"}}') == "too long"
    assert said(b'{"error": "no"}') == "no"
    assert said(b"<html>\xff") == "<html>\ufffd"
    assert said(b"[]") == "[]"
