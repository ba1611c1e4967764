"""Tests of fields that change what an answer shows, or which part of a prompt is used."""

import itertools
from typing import Any

import pytest

from tests.gateway.fakes import EOS, TOKENIZER, Client, FakeBackend, ends, ids, says, serve, texts
from tests.text.vocabulary import CHATML, make_tokenizer, make_vocabulary

PATHS = ["/v1/completions", "/v1/chat/completions"]
USER = {"role": "user", "content": "hi"}
OUTPUT = "one é two 😀 three"


def body(path: str, **fields: Any) -> dict[str, Any]:
    return ({"prompt": "hi"} if path == PATHS[0] else {"messages": [USER]}) | fields


async def whole(client: Client, path: str, **fields: Any) -> Any:
    return await (client.complete if path == PATHS[0] else client.chat)(**body(path, **fields))


async def streamed(client: Client, path: str, **fields: Any) -> list[dict[str, Any]]:
    return await (client.stream_completion if path == PATHS[0] else client.stream_chat)(**body(path, **fields))


def choices_of(chunks: list[dict[str, Any]], index: int = 0) -> list[dict[str, Any]]:
    return [choice for chunk in chunks for choice in chunk["choices"] if choice["index"] == index]


# token ids


@pytest.mark.parametrize("fields", [{}, {"stop": " three"}, {"logprobs": 1}, {"n": 2}, {"stream_interval": 3}])
@pytest.mark.parametrize("path", PATHS)
async def test_token_ids_come_with_their_text(path: str, fields: dict[str, Any]) -> None:
    """Each chunk has the ids of its text, so that those of all chunks joined are the answer's."""
    backend = FakeBackend(says(OUTPUT))
    if path == PATHS[1] and "logprobs" in fields:
        fields = {"logprobs": True, "top_logprobs": 1}
    async with serve(backend) as client:
        fields = {"max_tokens": 30, "return_token_ids": True} | fields
        answer, chunks = await whole(client, path, **fields), await streamed(client, path, **fields)
    expected = ids(OUTPUT) + ([] if "stop" in fields else [EOS])
    for choice in answer["choices"]:
        assert choice["token_ids"] == expected
        parts = [part.get("token_ids", []) for part in choices_of(chunks, choice["index"])]
        assert list(itertools.chain(*parts)) == expected
        if not {"stop", "stream_interval"} & set(fields):
            assert ids("é") in parts, "a character's tokens come together"
    prompt = backend.requests[0].tokens
    if path == PATHS[1]:
        assert answer["prompt_token_ids"] == prompt
        assert [chunk.get("prompt_token_ids") for chunk in chunks if chunk["choices"][0]["delta"].get("role")] == [
            prompt
        ] * len(answer["choices"])
        assert sum("prompt_token_ids" in chunk for chunk in chunks) == len(answer["choices"])
    else:
        assert all(choice["prompt_token_ids"] == prompt for choice in answer["choices"])
        for choice in answer["choices"]:
            first, *later = choices_of(chunks, choice["index"])
            assert first["prompt_token_ids"] == prompt
            assert not any("prompt_token_ids" in chunk for chunk in later)


@pytest.mark.parametrize("path", PATHS)
async def test_token_ids_wait_for_text_that_is_held_back(path: str) -> None:
    backend = FakeBackend(says("one two three"))
    backend.burst = 3
    async with serve(backend) as client:
        chunks = await streamed(client, path, return_token_ids=True, stop=" three five")
    assert [part["token_ids"] for part in choices_of(chunks) if "token_ids" in part] == [
        ids("one two"), [*ids(" three"), EOS]
    ]  # fmt: skip


@pytest.mark.parametrize("logprobs", [None, 1])
async def test_an_echo_is_no_part_of_the_token_ids(logprobs: int | None) -> None:
    async with serve(FakeBackend(says(" two"))) as client:
        fields: dict[str, Any] = {
            "prompt": ["hello", "one"], "echo": True, "return_token_ids": True, "logprobs": logprobs,
        }  # fmt: skip
        answer, chunks = await client.complete(**fields), await client.stream_completion(**fields)
    for index, prompt in enumerate(("hello", "one")):
        assert answer["choices"][index]["text"] == f"{prompt} two"
        assert answer["choices"][index]["prompt_token_ids"] == ids(prompt)
        first, *later = choices_of(chunks, index)
        assert first["prompt_token_ids"] == ids(prompt)
        streamed_ids = [id for choice in (first, *later) for id in choice["token_ids"]]
        assert streamed_ids == [*ids(" two"), EOS]
        assert answer["choices"][index]["token_ids"] == [*ids(" two"), EOS]


@pytest.mark.parametrize("include", [True, False])
async def test_token_ids_do_not_show_reasoning_that_is_left_out(include: bool) -> None:
    template = CHATML + "{% if false %}</think>{% endif %}"
    async with serve(FakeBackend(says("<think>\nWell.\n</think>\n\none two")), template=template) as client:
        fields: dict[str, Any] = {"include_reasoning": include, "return_token_ids": True}
        answer, chunks = await client.chat(**fields), await client.stream_chat(**fields)
    shown = [choice for choice in choices_of(chunks) if "token_ids" in choice]
    assert ("token_ids" in answer["choices"][0], bool(shown)) == (include, include)


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("asked", [{}, {"return_token_ids": False, "return_prompt_text": None}])
async def test_nothing_of_it_is_shown_unless_asked_for(path: str, asked: dict[str, Any]) -> None:
    async with serve() as client:
        answer, chunks = await whole(client, path, **asked), await streamed(client, path, **asked)
    for part in (answer, *chunks):
        assert not {"prompt_token_ids", "prompt_text"} & set(part)
        assert not any({"token_ids", "prompt_token_ids"} & set(choice) for choice in part["choices"])


async def test_tokens_may_be_named_by_their_ids() -> None:
    """In completions their names are keys, so that of two tokens of one text both are shown."""
    async with serve(FakeBackend(says("é"))) as client:
        for as_ids in (False, True):
            extra = {"return_tokens_as_token_ids": as_ids}
            fields: dict[str, Any] = {"prompt": "hi", "logprobs": 2, "echo": True} | extra
            entries = (await client.complete(**fields))["choices"][0]["logprobs"]
            tokens = [*ids("hi"), *ids("é"), EOS]
            names = [f"token_id:{token}" if as_ids else TOKENIZER.token_text(token) for token in tokens]
            assert entries["tokens"] == names
            assert all(name in top for name, top in zip(names[1:], entries["top_logprobs"][1:], strict=True))
            parts = [choice["logprobs"] for choice in choices_of(await client.stream_completion(**fields))]
            assert [name for part in parts for name in part["tokens"]] == names
            content = (await client.chat(logprobs=True, top_logprobs=2, **extra))["choices"][0]["logprobs"]["content"]
            assert [entry["token"] for entry in content] == names[2:]
            assert [entry["bytes"] for entry in content] == [[0xC3], [0xA9], list(b"</s>")]
            assert [entry["top_logprobs"][0]["token"] for entry in content] == names[2:]
            chunks = choices_of(await client.stream_chat(logprobs=True, **extra))
            joined = [entry["token"] for chunk in chunks if chunk["logprobs"] for entry in chunk["logprobs"]["content"]]
            assert joined == names[2:]


@pytest.mark.parametrize(
    ("fields", "shown"),
    [({"spaces_between_special_tokens": False}, " hello <s></s><tool> hello <s>"),
     ({}, " hello <s> </s> <tool> hello <s>"),
     ({"spaces_between_special_tokens": False, "skip_special_tokens": None}, " hello <tool> hello")],
)  # fmt: skip
async def test_special_tokens_may_stand_side_by_side(fields: dict[str, Any], shown: str) -> None:
    """Some tokenizers write spaces between all tokens; a token that was added gets none behind another one then."""
    tokenizer = make_vocabulary("no decoder").tokenizer
    output = [tokenizer.token_id(token) or 0 for token in ("hello", "<s>", "</s>", "<tool>", "hello", "<s>")]
    async with serve(FakeBackend(lambda _, __: output), tokenizer=tokenizer) as client:
        asked = {"prompt": [output[0]], "max_tokens": len(output), "skip_special_tokens": False, "ignore_eos": True}
        asked |= fields
        choice = (await client.complete(**asked, logprobs=0))["choices"][0]
        assert choice["text"] == shown
        assert choice["logprobs"]["text_offset"] == sorted(choice["logprobs"]["text_offset"])
        assert texts(await client.stream_completion(**asked)) == {0: shown}


# the prompt


@pytest.mark.parametrize(("side", "kept"), [(None, slice(-3, None)), ("left", slice(-3, None)), ("right", slice(3))])
@pytest.mark.parametrize("prompt", ["one two three four five", ids("one two three four five")])
async def test_a_prompt_is_cut_to_the_tokens_of_a_side(prompt: Any, side: str | None, kept: slice) -> None:
    backend = FakeBackend()
    async with serve(backend) as client:
        fields = {"truncate_prompt_tokens": 3, "truncation_side": side, "echo": True, "max_tokens": 2}
        answer = await client.complete(prompt=prompt, **fields)
        await client.complete(prompt=[prompt, prompt], **fields)
    expected = ids("one two three four five")[kept]
    assert [request.tokens for request in backend.requests] == [expected] * 3
    assert answer["choices"][0]["text"] == TOKENIZER.decode(expected) + "one two", "an echo shows what was used"
    assert answer["usage"]["prompt_tokens"] == 3


@pytest.mark.parametrize("side", ["left", "right"])
async def test_special_tokens_around_a_text_are_kept(side: str) -> None:
    tokenizer, backend = make_tokenizer(bos=True), FakeBackend()
    async with serve(backend, tokenizer=tokenizer) as client:
        fields = {"prompt": "one two three", "truncation_side": side}
        for length in (4, 3, 2, 1):
            await client.complete(**fields, truncate_prompt_tokens=length)
    bos, *words = tokenizer.encode("one two three")
    kept = [words[-length:] if side == "left" else words[:length] for length in (3, 2, 1)]
    alone = words[-1:] if side == "left" else [bos]
    assert [request.tokens for request in backend.requests] == [*([bos, *part] for part in kept), alone]


async def test_a_chat_is_cut_too() -> None:
    backend = FakeBackend()
    async with serve(backend) as client:
        await client.chat()
        answer = await client.chat(truncate_prompt_tokens=5, return_prompt_text=True, return_token_ids=True)
    entire, cut = (request.tokens for request in backend.requests)
    assert cut == entire[-5:] == answer["prompt_token_ids"]
    assert answer["prompt_text"] == TOKENIZER.decode(cut, skip_special_tokens=False)


@pytest.mark.parametrize(
    ("path", "fields", "room"),
    [(PATHS[0], {"max_tokens": 6}, 250), (PATHS[0], {}, 240), (PATHS[1], {"max_completion_tokens": 6}, 250),
     (PATHS[1], {}, 255), (PATHS[0], {"max_tokens": 0}, 256)],
)  # fmt: skip
async def test_minus_one_leaves_room_for_the_output(path: str, fields: dict[str, Any], room: int) -> None:
    """A completion without max_tokens has 16."""
    backend = FakeBackend()
    prompt = {"prompt": "x y " * 300} if path == PATHS[0] else {"messages": [USER | {"content": "x y " * 300}]}
    async with serve(backend) as client:
        assert (await client.refused(path, body(path, **fields) | prompt))[0] == 400
        await whole(client, path, **fields, **prompt, truncate_prompt_tokens=-1)
        short = await whole(client, path, **fields, truncate_prompt_tokens=-1)
    assert len(backend.requests[0].tokens) == room
    assert short["usage"]["prompt_tokens"] == len(backend.requests[1].tokens) < 30


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("stream", [False, True])
async def test_the_text_of_a_chats_prompt_may_be_shown(path: str, stream: bool) -> None:
    async with serve() as client:
        if path == PATHS[0]:
            status, error = await client.refused(path, body(path, return_prompt_text=True, stream=stream))
            assert (status, error["param"]) == (400, "return_prompt_text"), "it is a field of chats"
            return
        expected = "<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n"
        if not stream:
            assert (await client.chat(return_prompt_text=True))["prompt_text"] == expected
            return
        chunks = await client.stream_chat(return_prompt_text=True, n=2)
        assert [chunk["prompt_text"] for chunk in chunks if "prompt_text" in chunk] == [expected] * 2
        assert [chunk["choices"][0]["index"] for chunk in chunks if "prompt_text" in chunk] == [0, 1]
        assert all(chunk["choices"][0]["delta"].get("role") for chunk in chunks if "prompt_text" in chunk)


async def test_what_choices_repeat_of_a_prompt_has_a_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("services.gateway.bounds.MAX_REPEATED", 200)
    long = {"messages": [USER | {"content": "x" * 50}]}
    async with serve() as client:
        cases: list[tuple[str, dict[str, Any], str | None]] = [
            (PATHS[0], {"prompt": "x" * 50, "echo": True, "n": 4}, None),
            (PATHS[0], {"prompt": "x" * 50, "echo": True, "n": 5}, "echo"),
            (PATHS[0], {"prompt": ["x" * 50] * 5, "echo": True}, "echo"),
            (PATHS[0], {"prompt": [7] * 14, "return_token_ids": True, "n": 2}, None),
            (PATHS[0], {"prompt": [7] * 15, "return_token_ids": True, "n": 2}, "return_token_ids"),
            (PATHS[1], long | {"return_prompt_text": True, "n": 3}, None),
            (PATHS[1], long | {"return_prompt_text": True, "n": 3, "stream": True}, "return_prompt_text"),
            (PATHS[1], {"return_token_ids": True, "n": 3, "stream": True}, "return_token_ids"),
            (PATHS[1], {"messages": [USER, {"role": "assistant", "content": "x" * 50}], "echo": True, "n": 5}, "echo"),
        ]
        for path, fields, param in cases:
            async with client.post(path, json=body(path) | fields) as response:
                answer = await response.text()
                assert response.status == (200 if param is None else 400), (fields, answer)
                if param is not None:
                    error = (await response.json())["error"]
                    assert (error["param"], "200 characters" in error["message"]) == (param, True)


# echoes in chats


CONTINUED: dict[str, Any] = {"add_generation_prompt": False, "continue_final_message": True}


@pytest.mark.parametrize(
    ("last", "fields", "echo"),
    [
        ({"role": "assistant", "content": "hello"}, CONTINUED, "hello"),
        ({"role": "assistant", "content": "hello"}, {}, "hello"),
        ({"role": "assistant", "content": [{"type": "text", "text": part} for part in ("a", "b")]}, CONTINUED, "a\nb"),
        ({"role": "assistant", "content": None, "tool_calls": []}, {}, ""),
        ({"role": "user", "content": "hello"}, {}, ""),
        ({"role": "user", "content": "hello"}, {"add_generation_prompt": False}, "hello"),
        ({"role": "assistant", "content": "hello"}, {"echo": False}, ""),
    ],
)
@pytest.mark.parametrize("n", [1, 2])
async def test_an_answer_may_begin_with_the_last_message(
    last: dict[str, Any], fields: dict[str, Any], echo: str, n: int
) -> None:
    """It does if the role of the last message is the one that answers, as in vLLM."""
    role = last["role"] if fields.get("add_generation_prompt") is False else "assistant"
    async with serve() as client:
        fields = {"messages": [USER, last], "echo": True, "n": n} | fields
        answer, chunks = await client.chat(**fields), await client.stream_chat(**fields)
    for choice in answer["choices"]:
        assert (choice["message"]["role"], choice["message"]["content"]) == (role, f"{echo}one two three")
        deltas = [part["delta"] for part in choices_of(chunks, choice["index"])]
        assert deltas[0] == {"role": role, "content": ""}
        assert (deltas[1]["content"] == echo) == bool(echo)
    assert set(texts(chunks).values()) == {f"{echo}one two three"}


async def test_an_echo_stands_before_calls_and_reasoning() -> None:
    template = CHATML + "{% if false %}</think>{% endif %}"
    async with serve(FakeBackend(says("<think>\nWell.\n</think>\n\none")), template=template) as client:
        fields: dict[str, Any] = {"messages": [USER, {"role": "assistant", "content": "so "}], "echo": True}
        message = (await client.chat(**fields))["choices"][0]["message"]
        assert (message["content"], message["reasoning"]) == ("so one", "Well.")
        assert texts(await client.stream_chat(**fields)) == {0: "so one"}
        assert (await client.chat(**fields, max_tokens=10))["choices"][0]["message"]["content"] == "so "


# ids of requests


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize(
    ("header", "field", "expected"),
    [("head-1", None, "head-1"), ("head-1", "body-1", "head-1"), (None, "body-1", "body-1"),
     ("x" * 129, "body-1", "body-1"), (None, "x" * 128, "x" * 128), (None, None, None)],
)  # fmt: skip
async def test_the_header_wins_over_the_body_and_both_over_a_new_id(
    path: str, stream: bool, header: str | None, field: str | None, expected: str | None
) -> None:
    backend = FakeBackend()
    headers = {} if header is None else {"X-Request-Id": header}
    kind = "cmpl" if path == PATHS[0] else "chatcmpl"
    async with (
        serve(backend) as client,
        client.post(path, json=body(path, request_id=field, stream=stream), headers=headers) as response,
    ):
        id, answer = response.headers["X-Request-Id"], await response.text()
        assert response.status == 200
    assert expected in (None, id)
    assert f'"id":"{kind}-{id}"' in answer.replace(" ", "")
    assert backend.requests[0].request_id == f"{kind}-{id}"


# chunks


def lengths(chunks: list[dict[str, Any]]) -> list[int]:
    """Return the number of words of each chunk with text; a token of the output is a word."""
    return [len(words) for chunk in chunks if (words := "".join(texts([chunk]).values()).split())]


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize(
    ("server", "request_", "expected"),
    [(1, None, [1] * 9), (1, 4, [1, 4, 4]), (3, None, [1, 3, 3, 2]), (3, 1, [1] * 9), (1, 5.0, [1, 5, 3]),
     (1, 10**9, [1, 8])],
)  # fmt: skip
async def test_chunks_may_hold_several_tokens(path: str, server: int, request_: Any, expected: list[int]) -> None:
    """The first token comes at once, and the last chunk has what is left."""
    async with serve(FakeBackend(says("one" + " two three" * 4)), stream_interval=server) as client:
        fields: dict[str, Any] = {"stream_interval": request_, "stream_options": {"include_usage": True}}
        chunks = await streamed(client, path, **fields)
        assert lengths(chunks) == expected
        assert texts(chunks) == {0: "one" + " two three" * 4}
        assert ends(chunks) == {0: ["stop"]}
        assert chunks[-1]["usage"]["completion_tokens"] == 10
        answer = await whole(client, path, stream_interval=request_)
        assert answer["usage"]["completion_tokens"] == 10, "a whole answer is the same with and without"


async def test_the_interval_counts_the_tokens_of_each_choice() -> None:
    async with serve(FakeBackend(says("one two three four five", "six"))) as client:
        fields: dict[str, Any] = {"prompt": "x", "n": 2, "logprobs": 0, "stream_interval": 3}
        options = {"include_usage": True, "continuous_usage_stats": True}
        chunks = await client.stream_completion(**fields, stream_options=options)
        assert [choice["text"] for choice in choices_of(chunks)] == ["one", " two three four", " five"]
        tokens = [choice["logprobs"]["tokens"] for choice in choices_of(chunks)]
        assert tokens == [["one"], [" two", " three", " four"], [" five", "</s>"]]
        assert chunks[-2]["usage"]["completion_tokens"] == chunks[-1]["usage"]["completion_tokens"]


# repetitions


LOOP = "hello" + " two three" * 20
DETECTION: dict[str, Any] = {"max_pattern_size": 4, "min_count": 3}


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize(
    ("detection", "num_words"),
    [(DETECTION, 7), (DETECTION | {"min_count": 4}, 9), (DETECTION | {"min_pattern_size": 3}, 13),
     (DETECTION | {"max_pattern_size": 1}, None), ({"max_pattern_size": 0}, None), ({}, None), (None, None),
     ({"max_pattern_size": 2.0, "min_pattern_size": 2.0, "min_count": 2.0}, 5)],
)  # fmt: skip
async def test_a_repetition_ends_an_output(path: str, detection: Any, num_words: int | None) -> None:
    backend = FakeBackend(says(LOOP))
    async with serve(backend) as client:
        answer = await whole(client, path, repetition_detection=detection, max_tokens=60)
        chunks = await streamed(client, path, repetition_detection=detection, max_tokens=60)
        samples = (await (await client.get("/metrics")).text()).splitlines()
    choice = answer["choices"][0]
    text = choice["text"] if path == PATHS[0] else choice["message"]["content"]
    assert texts(chunks) == {0: text}
    last = choices_of(chunks)[-1]
    if num_words is None:
        assert (text, choice["finish_reason"], last["finish_reason"]) == (LOOP, "stop", "stop")
        return
    assert len(text.split()) == num_words
    for end in (choice, last):
        assert (end["finish_reason"], end["stop_reason"]) == ("repetition", "repetition_detected")
    assert [request.aborted for request in backend.requests] == [[0], [0]], "the engine stops too"
    assert answer["usage"]["completion_tokens"] == num_words
    assert any('finished_reason="repetition"' in line and line.endswith(" 2.0") for line in samples)


async def test_a_repetition_comes_after_min_tokens_and_what_ends_an_output_anyway_counts_first() -> None:
    async with serve(FakeBackend(says(LOOP))) as client:
        fields: dict[str, Any] = {"prompt": "x", "repetition_detection": DETECTION}
        for extra, expected in (
            ({"min_tokens": 9, "max_tokens": 20}, (9, "repetition")),
            ({"max_tokens": 7}, (7, "length")),
            ({"max_tokens": 20, "stop": " three two three two three"}, (2, "stop")),
            ({"max_tokens": 20, "stop": " three two three two three six"}, (7, "repetition")),
        ):
            choice = (await client.complete(**fields, **extra))["choices"][0]
            assert (len(choice["text"].split()), choice["finish_reason"]) == expected, extra
