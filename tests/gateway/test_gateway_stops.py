"""Tests of stop strings and stop tokens, in whole and streamed responses."""

from typing import Any

import pytest

from tests.gateway.fakes import END_TURN, EOS, TOKENIZER, Client, FakeBackend, Script, ends, ids, says, serve, texts


async def both(client: Client, **fields: Any) -> tuple[str, str, Any]:
    """Return the text, finish reason and stop reason of a completion, which must be the same in a stream."""
    chunks = await client.stream_completion(**{"prompt": "hi"} | fields)
    choice = (await client.complete(**{"prompt": "hi"} | fields))["choices"][0]
    assert texts(chunks)[0] == choice["text"]
    assert ends(chunks)[0] == [choice["finish_reason"]]
    assert chunks[-1]["choices"][0]["stop_reason"] == choice["stop_reason"]
    return choice["text"], choice["finish_reason"], choice["stop_reason"]


async def answers(script: Script, **fields: Any) -> tuple[str, str, Any]:
    async with serve(FakeBackend(script)) as client:
        return await both(client, **fields)


async def test_a_stop_string_over_several_tokens() -> None:
    """STP-01."""
    script = says("one two three four five")
    stopped = await answers(script, stop="three four five", max_tokens=9)
    assert stopped == ("one two ", "stop", "three four five")
    missed = await answers(script, stop=["three four six"], max_tokens=5)
    assert missed == ("one two three four five", "length", None)


@pytest.mark.parametrize(("stop", "shown"), [("ewp", "previ"), ("ie", "prev")])
async def test_a_stop_string_inside_and_across_tokens(stop: str, shown: str) -> None:
    """STP-02."""
    script = says(ids("pre") + ids("view") + ids("port"))
    assert await answers(script, stop=stop) == (shown, "stop", stop)


@pytest.mark.parametrize(
    ("output", "max_tokens", "expected"),
    [
        ("hi\n\nUs", 99, ("hi\n\nUs", "stop", None)),
        ("hi\n\nUs", 3, ("hi\n", "length", None)),
        ("hi\n\nUsX", 99, ("hi\n\nUs", "stop", "X")),
    ],
)
async def test_held_text_comes_at_the_end(output: str, max_tokens: int, expected: Any) -> None:
    """STP-03."""
    assert await answers(says(output), stop=["\n\nUser:", "X"], max_tokens=max_tokens) == expected


async def test_no_delta_is_empty_and_none_is_late() -> None:
    """STP-05."""
    async with serve(FakeBackend(says("The cat sat"))) as client:
        chunks = await client.stream_chat(stop=["z" * 40])
        contents = [chunk["choices"][0]["delta"].get("content") for chunk in chunks]
        assert contents == ["", *_pieces("The cat sat"), ""]
        chunks = await client.stream_chat(stop=["cat sat on"])  # the text is held back, so there are fewer chunks
        contents = [chunk["choices"][0]["delta"].get("content") for chunk in chunks]
        assert all(contents[1:-1])
        assert "".join(filter(None, contents)) == "The cat sat"


def _pieces(text: str) -> list[str]:
    return [TOKENIZER.decode([token]) for token in ids(text)]


@pytest.mark.parametrize(
    ("skip", "stop", "expected"),
    [
        (True, "<|im_end|>", ("All done.", "stop", "<|im_end|>")),
        (True, "im", ("All done. two", "stop", None)),
        (False, "<|im_end|>", ("All done.", "stop", "<|im_end|>")),
        (False, "im", ("All done.<|", "stop", "im")),
    ],
)
async def test_a_special_token_is_a_stop_string(skip: bool, stop: str, expected: tuple[str, str, str | None]) -> None:
    """STP-07, TXT-04: as a whole; a part of its name is one only where it is shown."""
    script = says([*ids("All done."), END_TURN, *ids(" two")])
    assert await answers(script, stop=[stop], skip_special_tokens=skip, max_tokens=40) == expected


@pytest.mark.parametrize(
    ("skip", "include", "shown"),
    [(True, False, "All done."), (False, False, "All done."), (False, True, "All done.</s>")],
)
async def test_a_stop_token(skip: bool, include: bool, shown: str) -> None:
    """STP-08."""
    answer = await answers(
        says([*ids("All done."), EOS]),
        stop_token_ids=[EOS],
        skip_special_tokens=skip,
        include_stop_str_in_output=include,
        max_tokens=40,
    )
    assert answer == (shown, "stop", EOS)


@pytest.mark.parametrize("stop", ["", [""], ["", "x"], ["a", "b", "c", "d", "e"]])
@pytest.mark.parametrize("path", ["/v1/completions", "/v1/chat/completions"])
async def test_empty_and_too_many_stop_strings_are_refused(path: str, stop: Any) -> None:
    """STP-10."""
    async with serve() as client:
        status, error = await client.refused(
            path, {"stop": stop} | ({"prompt": "x"} if "chat" not in path else {"messages": [{"role": "user"}]})
        )
        assert (status, error["param"]) == (400, "stop")


@pytest.mark.parametrize("stop", [None, []])
async def test_no_stop_strings_are_no_stop(stop: Any) -> None:
    """STP-10."""
    assert await answers(says("one two"), stop=stop) == ("one two", "stop", None)


async def test_a_stop_string_ends_the_sample_at_the_engine() -> None:
    backend = FakeBackend(says("one two", "three four five"))
    async with serve(backend) as client:
        whole = await client.complete(prompt="hi", n=2, stop=" four", max_tokens=9)
    assert [choice["finish_reason"] for choice in whole["choices"]] == ["stop", "stop"]
    assert backend.requests[0].aborted == [1]
    assert whole["usage"]["completion_tokens"] == len([*ids("one two"), EOS]) + len(ids("three four"))


async def test_include_stop_str_in_output_shows_it() -> None:
    answer = await answers(says("one two three"), stop="wo", include_stop_str_in_output=True)
    assert answer == ("one two", "stop", "wo")


async def test_min_tokens_delays_stop_strings_and_stop_tokens() -> None:
    """SMP-20."""
    script = says(" two two two two two")
    assert await answers(script, stop="two", min_tokens=2) == (" two two ", "stop", "two")
    assert (await answers(says([EOS, *ids("one")]), min_tokens=1))[0] == "one"
    hidden = await answers(says([END_TURN, *ids("one"), END_TURN]), stop="<|im_end|>", min_tokens=2)
    assert hidden == ("one", "stop", "<|im_end|>")


async def test_ignore_eos_goes_on() -> None:
    script = says([*ids("one"), EOS, *ids(" two"), EOS])
    assert await answers(script, ignore_eos=True, max_tokens=4) == ("one two", "length", None)
    assert await answers(script) == ("one", "stop", None)


@pytest.mark.parametrize(
    ("output", "fields", "reason"),
    [
        ("one two three four five six", {"max_tokens": 1}, "length"),
        ("one two three four five six", {"max_tokens": 5}, "length"),
        ("one two three four", {"max_tokens": 5}, "stop"),
        ("one two three four five", {"max_tokens": 5, "stop": "five"}, "stop"),
    ],
)
async def test_a_stop_in_the_last_allowed_token_is_a_stop(output: str, fields: Any, reason: str) -> None:
    """LIM-15."""
    assert (await answers(says(output), **fields))[1] == reason
