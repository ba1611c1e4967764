"""Tests of log-probabilities in the responses of both endpoints."""

import json
from collections.abc import Sequence
from typing import Any

import pytest

from shared.text.logprobs import LogprobEntry, prompt_entries
from shared.text.tokenizer import Tokenizer
from tests.gateway.fakes import (
    END_TURN,
    EOS,
    TOKENIZER,
    VOCAB,
    Client,
    FakeBackend,
    error_of,
    ids,
    says,
    serve,
    texts,
)

JSON = {"type": "json_schema", "json_schema": {"name": "any", "schema": {}}}


async def streamed_completion(client: Client, **fields: Any) -> dict[str, list[Any]]:
    """Return the joined logprobs of a streamed completion."""
    joined: dict[str, list[Any]] = {"text_offset": [], "token_logprobs": [], "tokens": [], "top_logprobs": []}
    for chunk in await client.stream_completion(**fields):
        for name in joined:
            joined[name] += chunk["choices"][0]["logprobs"][name]
    return joined


async def streamed_chat(client: Client, **fields: Any) -> list[Any]:
    logprobs = []
    for chunk in await client.stream_chat(**fields):
        logprobs += (chunk["choices"][0]["logprobs"] or {"content": []})["content"]
    return logprobs


async def test_a_stop_string_as_the_first_token() -> None:
    """LGP-09."""
    async with serve(FakeBackend(says("\none two"))) as client:
        fields: dict[str, Any] = {"prompt": "x", "stop": "\n", "logprobs": 5}
        choice = (await client.complete(**fields))["choices"][0]
        assert (choice["text"], choice["finish_reason"]) == ("", "stop")
        assert choice["logprobs"]["tokens"] == [
            "\n"
        ]  # one entry for each generated token, those of the stop string included
        assert choice["logprobs"] == await streamed_completion(client, **fields)


@pytest.mark.parametrize("path", ["/v1/completions", "/v1/chat/completions"])
@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("extra", [{"top_k": 1}, {"logit_bias": {"20": -100}}, {"response_format": JSON}], ids=str)
async def test_no_log_probability_is_infinite(path: str, stream: bool, extra: dict[str, Any]) -> None:
    """LGP-01: the engine's last alternative is at -inf, which JSON does not have."""
    chat = "chat" in path
    fields: dict[str, Any] = {"logprobs": True, "top_logprobs": 20} if chat else {"logprobs": 20}
    fields |= {"messages": [{"role": "user", "content": "hi"}]} if chat else {"prompt": "hi"}
    backend = FakeBackend(says('{"a": 1}'))
    async with serve(backend) as client, client.post(path, json=fields | extra | {"stream": stream}) as response:
        assert response.status == 200
        text = await response.text()
    lines = [line.removeprefix("data: ") for line in text.splitlines() if line and "[DONE]" not in line]
    answers = [json.loads(line, parse_constant=pytest.fail) for line in lines]
    logprobs = [choice["logprobs"] for answer in answers for choice in answer["choices"] if choice["logprobs"]]
    if chat:
        values = [[other["logprob"] for other in entry["top_logprobs"]] for one in logprobs for entry in one["content"]]
    else:
        values = [list(top.values()) for one in logprobs for top in one["top_logprobs"]]
    assert len(values) == len(ids('{"a": 1}')) + 1
    assert all(min(top) == -9999.0 for top in values)


@pytest.mark.parametrize("extra", [{}, {"response_format": JSON}], ids=str)
async def test_special_tokens_are_named_and_the_end_token_has_an_entry(extra: dict[str, Any]) -> None:
    """LGP-10."""
    async with serve(FakeBackend(says([*ids("one"), END_TURN, EOS]))) as client:
        fields: dict[str, Any] = {"logprobs": True, "top_logprobs": 5} | extra
        content = (await client.chat(**fields))["choices"][0]["logprobs"]["content"]
        assert [entry["token"] for entry in content] == ["one", "<|im_end|>", "</s>"]
        assert content == await streamed_chat(client, **fields)


async def test_a_chats_entries() -> None:
    """LGP-11."""
    async with serve(FakeBackend(says("one é"))) as client:
        answer = await client.chat(logprobs=True, top_logprobs=2)
        content = answer["choices"][0]["logprobs"]["content"]
        assert len(content) == answer["usage"]["completion_tokens"]
        assert [entry["token"] for entry in content[1:]] == [" ", r"bytes:\xc3", r"bytes:\xa9", "</s>"]
        assert all(len(entry["top_logprobs"]) == 2 for entry in content)
        assert all(set(other) == {"token", "logprob", "bytes"} for entry in content for other in entry["top_logprobs"])
        assert content[0]["top_logprobs"][1]["logprob"] == -9999.0
        assert content == await streamed_chat(client, logprobs=True, top_logprobs=2)


async def test_named_tokens_are_the_alternatives() -> None:
    """They come in the request's order, once each, whatever number of likely ones is asked for besides."""
    backend = FakeBackend(says("one é"))
    named = [300, 7, 300, ids("one")[0]]
    listed = list(dict.fromkeys(named))
    async with serve(backend) as client:
        for count in (0, 2):
            fields: dict[str, Any] = {"logprob_token_ids": named, "return_tokens_as_token_ids": True}
            scores: dict[str, Any] = {"logprobs": True, "top_logprobs": count} | fields
            content = (await client.chat(**scores))["choices"][0]["logprobs"]["content"]
            assert content == await streamed_chat(client, **scores)
            expected = [(f"token_id:{id}", -id / 1000) for id in listed]
            assert all(
                [(one["token"], one["logprob"]) for one in place["top_logprobs"]] == expected for place in content
            )
            assert [place["token"] for place in content] == [f"token_id:{id}" for id in [*ids("one é"), EOS]]
            whole = await client.complete(prompt="x", logprobs=count, **fields)
            logprobs = whole["choices"][0]["logprobs"]
            assert logprobs == await streamed_completion(client, prompt="x", logprobs=count, **fields)
            for token, top in zip(logprobs["tokens"], logprobs["top_logprobs"], strict=True):
                assert top == dict(expected) | {token: -int(token.removeprefix("token_id:")) / 1000}
        answer = await client.respond(
            include=["message.output_text.logprobs"], top_logprobs=count, logprob_token_ids=named
        )
        shown = answer["output"][0]["content"][0]["logprobs"]
        assert [[one["logprob"] for one in place["top_logprobs"]] for place in shown] == [
            [-id / 1000 for id in listed]
        ] * len(shown)
    assert {tuple(request.sampling.logprob_token_ids) for request in backend.requests} == {tuple(listed)}
    assert {request.sampling.logprobs for request in backend.requests} == {0}


async def test_an_echo_has_the_likeliest_tokens_of_the_prompt() -> None:
    async with serve(FakeBackend(says("one"))) as client:
        fields: dict[str, Any] = {"prompt": [20, 21], "echo": True, "logprobs": 2, "logprob_token_ids": [7]}
        fields["return_tokens_as_token_ids"] = True
        tops = (await client.complete(**fields))["choices"][0]["logprobs"]["top_logprobs"]
    assert [sorted(top or ()) for top in tops] == [
        [], ["token_id:21", "token_id:22"], *(sorted(["token_id:7", f"token_id:{id}"]) for id in [*ids("one"), EOS])
    ]  # fmt: skip


@pytest.mark.parametrize("count", [0, 1, 5])
async def test_a_completions_entries(count: int) -> None:
    """LGP-12."""
    async with serve(FakeBackend(says("one two"))) as client:
        logprobs = (await client.complete(prompt="x", logprobs=count))["choices"][0]["logprobs"]
        tokens = [*ids("one two"), EOS]
        assert logprobs["tokens"] == [TOKENIZER.token_text(token) for token in tokens]
        assert logprobs["token_logprobs"] == [-token / 1000 for token in tokens]
        assert logprobs["text_offset"] == [0, 3, 7]
        assert [len(top) for top in logprobs["top_logprobs"]] == [max(count, 1)] * 3
        assert all(name in top for name, top in zip(logprobs["tokens"], logprobs["top_logprobs"], strict=True))


async def test_of_tokens_that_read_alike_the_likelier_one_stays() -> None:
    token = VOCAB - 3  # it and the next two are padding, without text
    async with serve(FakeBackend(says([token]))) as client:
        logprobs = (await client.complete(prompt="x", logprobs=3, max_tokens=1))["choices"][0]["logprobs"]
        assert logprobs["top_logprobs"] == [{"": -token / 1000}]


async def test_logprobs_without_alternatives() -> None:
    """LGP-12."""
    async with serve() as client:
        content = (await client.chat(logprobs=True))["choices"][0]["logprobs"]["content"]
        assert all(entry["top_logprobs"] == [] and entry["logprob"] is not None for entry in content)
        assert (await client.chat())["choices"][0]["logprobs"] is None
        assert (await client.chat(logprobs=False, top_logprobs=0))["choices"][0]["logprobs"] is None


@pytest.mark.parametrize("logprobs", [{}, {"logprobs": False}, {"logprobs": None}])
async def test_alternatives_need_logprobs(logprobs: dict[str, Any]) -> None:
    """LGP-12."""
    async with serve() as client:
        messages = [{"role": "user", "content": "hi"}]
        fields = {"messages": messages, "top_logprobs": 2} | logprobs
        status, error = await client.refused("/v1/chat/completions", fields)
        assert (status, error["param"]) == (400, "top_logprobs")


@pytest.mark.parametrize("stream", [False, True])
async def test_an_echo_has_the_prompts_entries_too(stream: bool) -> None:
    """LGP-02: the first token has none, and the offsets are those of the text."""
    async with serve(FakeBackend(says(" one two"))) as client:
        fields: dict[str, Any] = {"prompt": "hello six", "echo": True, "logprobs": 1, "max_tokens": 2, "n": 2}
        if stream:
            chunks = await client.stream_completion(**fields)
            mine = [chunk["choices"][0] for chunk in chunks if chunk["choices"][0]["index"] == 1]
            logprobs = {name: [x for choice in mine for x in choice["logprobs"][name]] for name in mine[0]["logprobs"]}
            text = "".join(choice["text"] for choice in mine)
        else:
            choice = (await client.complete(**fields))["choices"][1]
            logprobs, text = choice["logprobs"], choice["text"]
        assert text == "hello six" + TOKENIZER.decode(ids(" one two")[:2])
        assert logprobs["tokens"] == [TOKENIZER.token_text(token) for token in ids("hello six") + ids(" one two")[:2]]
        assert logprobs["token_logprobs"][0] is logprobs["top_logprobs"][0] is None
        assert logprobs["token_logprobs"][1] == -ids("hello six")[1] / 1000
        assert logprobs["text_offset"][:3] == [0, 5, 9]


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("skip", [False, True])
@pytest.mark.parametrize("prompt", [ids("<s>hello<|im_end|> six<s><s>"), "<s>hello<|im_end|> six<s><s>"])
async def test_an_echo_shows_the_special_tokens_of_a_prompt(prompt: Any, skip: bool, stream: bool) -> None:
    """TXT-05: the tokens spell the text, and the offsets point into it."""
    async with serve(FakeBackend(says(" one two"))) as client:
        fields: dict[str, Any] = {"prompt": prompt, "echo": True, "max_tokens": 3, "skip_special_tokens": skip}
        whole = (await client.complete(**fields))["choices"][0]
        scored = (await client.complete(**fields, logprobs=1, prompt_logprobs=1))["choices"][0]
        if stream:
            assert texts(await client.stream_completion(**fields)) == {0: whole["text"]}
            assert await streamed_completion(client, **fields, logprobs=1) == scored["logprobs"]
    logprobs = scored["logprobs"]
    assert whole["text"] == scored["text"] == "".join(logprobs["tokens"]) == "<s>hello<|im_end|> six<s><s> one two"
    starts = [len("".join(logprobs["tokens"][:at])) for at in range(len(logprobs["tokens"]))]
    assert logprobs["text_offset"] == starts


async def test_an_echo_of_tokens_goes_on_inside_their_last_character() -> None:
    """TXT-05"""
    hello, (first, second) = ids("hello"), ids("é")
    for output, shown in ([second], "é"), (ids("one"), "\ufffdone"), ([END_TURN], "\ufffd"):
        async with serve(FakeBackend(says(output))) as client:
            fields: dict[str, Any] = {"prompt": [*hello, first], "echo": True, "max_tokens": 1}
            assert (await client.complete(**fields))["choices"][0]["text"] == "hello" + shown
            assert texts(await client.stream_completion(**fields)) == {0: "hello" + shown}
            offsets = (await client.complete(**fields, logprobs=0))["choices"][0]["logprobs"]["text_offset"]
            assert offsets == [0, 5, 6 if shown == "\ufffdone" else 5]


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("length", [1, 16, 255, 256])
@pytest.mark.parametrize("max_tokens", [0, 1])
async def test_an_echo_has_an_entry_for_each_token(length: int, max_tokens: int, stream: bool) -> None:
    """LGP-04: of the prompt and of the output, for a prompt of one token, of a block and of the whole context."""
    async with serve() as client:
        fields: dict[str, Any] = {"prompt": [20] * length, "echo": True, "logprobs": 1, "max_tokens": max_tokens}
        if length + max_tokens > 256:
            assert (await client.refused("/v1/completions", fields | {"stream": stream}))[0] == 400
            return
        if stream:
            logprobs = await streamed_completion(client, **fields)
        else:
            logprobs = (await client.complete(**fields))["choices"][0]["logprobs"]
        assert [len(entries) for entries in logprobs.values()] == [length + max_tokens] * 4
        assert logprobs["token_logprobs"].index(None) == 0
        assert logprobs["token_logprobs"].count(None) == 1
        assert (await client.get("/health")).status == 200


async def test_a_chat_without_output_is_empty() -> None:
    """LGP-04."""
    async with serve() as client:
        answer = await client.chat(max_tokens=0, logprobs=True)
    (choice,) = answer["choices"]
    assert (choice["message"]["content"], choice["finish_reason"]) == ("", "length")
    assert choice["logprobs"] == {"content": []}
    assert answer["usage"]["completion_tokens"] == 0


async def test_an_echo_alone_can_score_a_prompt() -> None:
    async with serve() as client:
        choice = (await client.complete(prompt="hello six", echo=True, logprobs=1, max_tokens=0))["choices"][0]
        assert choice["text"] == "hello six"
        assert choice["logprobs"]["tokens"] == ["hello", " six"]
        chunks = await client.stream_completion(prompt="hello six", echo=True, logprobs=1, max_tokens=0)
        assert chunks[0]["choices"][0]["logprobs"] == choice["logprobs"]


@pytest.mark.parametrize("chat", [False, True])
async def test_prompt_logprobs_are_by_token_id(chat: bool) -> None:
    backend = FakeBackend()
    async with serve(backend) as client:
        if chat:
            logprobs = (await client.chat(prompt_logprobs=2))["prompt_logprobs"]
        else:
            logprobs = (await client.complete(prompt="hello six", prompt_logprobs=2))["choices"][0]["prompt_logprobs"]
    tokens = backend.requests[0].tokens
    assert len(logprobs) == len(tokens)
    assert logprobs[0] is None
    own = logprobs[1][str(tokens[1])]
    assert own == {"logprob": -tokens[1] / 1000, "rank": 1, "decoded_token": TOKENIZER.token_text(tokens[1])}
    assert len(logprobs[1]) == 2
    json.dumps(logprobs, allow_nan=False)


async def test_no_logprobs_unless_asked_for() -> None:
    backend = FakeBackend()
    async with serve(backend) as client:
        choice = (await client.complete(prompt="x"))["choices"][0]
    assert choice["logprobs"] is None
    assert choice["prompt_logprobs"] is None
    assert (backend.requests[0].sampling.logprobs, backend.requests[0].sampling.prompt_logprobs) == (-1, -1)


@pytest.mark.parametrize("stream", [False, True])
async def test_a_prompts_entries_are_made_once_whatever_number_of_choices_shows_them(
    stream: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    lengths: list[int] = []

    def counting(tokenizer: Tokenizer, prompt: Sequence[int], *rest: Any) -> list[LogprobEntry]:
        lengths.append(len(prompt))
        return prompt_entries(tokenizer, prompt, *rest)

    monkeypatch.setattr("shared.text.request_text.prompt_entries", counting)
    async with serve(FakeBackend(says("one", "two"))) as client:
        fields = {"prompt": [[20, 21], [22, 23, 24]], "echo": True, "logprobs": 1, "n": 3, "max_tokens": 1}
        if stream:
            choices = [chunk["choices"][0] for chunk in await client.stream_completion(**fields)]
        else:
            choices = (await client.complete(**fields))["choices"]
        assert sorted(lengths) == [2, 3]
        assert {choice["index"]: len(choice["logprobs"]["tokens"]) for choice in choices} == {
            0: 3, 1: 3, 2: 3, 3: 4, 4: 4, 5: 4
        }  # fmt: skip


@pytest.mark.parametrize(("path", "field"), [("/v1/completions", "logprobs"), ("/v1/chat/completions", "top_logprobs")])
async def test_log_probabilities_of_one_answer_have_a_limit(
    path: str, field: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """DOS-04: samples times tokens times alternatives. A stream passes them on as they come."""
    monkeypatch.setattr("services.gateway.stream.MAX_LOGPROBS_AT_ONCE", 10 * 20 * 21)
    fields: dict[str, Any] = {"max_tokens": 20, field: 20}
    fields |= {"prompt": "hi"} if field == "logprobs" else {"messages": [{"role": "user", "content": "hi"}]}
    fields |= {"logprobs": True} if field == "top_logprobs" else {}
    async with serve() as client:
        for n, stream, status in ((10, False, 200), (11, False, 400), (11, True, 200)):
            async with client.post(path, json=fields | {"n": n, "stream": stream}) as response:
                assert response.status == status
                if status == 400:
                    error = await error_of(response)
                    assert error["param"] == field
                    assert "4620" in error["message"]
                    assert "4200" in error["message"]


async def test_named_tokens_count_to_that_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("services.gateway.stream.MAX_LOGPROBS_AT_ONCE", 10 * 20 * 31)
    fields: dict[str, Any] = {"prompt": "hi", "max_tokens": 20, "logprobs": 0, "logprob_token_ids": list(range(30))}
    async with serve() as client:
        await client.complete(n=10, **fields)
        status, error = await client.refused("/v1/completions", fields | {"n": 11})
    assert (status, error["param"]) == (400, "logprob_token_ids")


@pytest.mark.parametrize(("interval", "status"), [(1, 200), (10, 200), (11, 400), (10**9, 400)])
async def test_a_stream_holds_no_more_log_probabilities_back(
    interval: int, status: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("services.gateway.stream.MAX_LOGPROBS_AT_ONCE", 10 * 20 * 21)
    fields = {"prompt": "hi", "n": 20, "max_tokens": 200, "logprobs": 20, "stream": True, "stream_interval": interval}
    async with serve() as client, client.post("/v1/completions", json=fields) as response:
        assert response.status == status
    async with serve(stream_interval=interval) as client:
        del fields["stream_interval"]
        async with client.post("/v1/completions", json=fields) as response:
            assert response.status == status, "the server's own interval counts as well"


@pytest.mark.parametrize("count", [-1, 21, VOCAB])
@pytest.mark.parametrize("path", ["/v1/completions", "/v1/chat/completions"])
async def test_more_alternatives_than_there_can_be_are_refused(path: str, count: int) -> None:
    """DOS-04: for long prompts too."""
    chat = "chat" in path
    text = {"messages": [{"role": "user", "content": "x" * 5000}]} if chat else {"prompt": [20] * 5000}
    async with serve(FakeBackend(max_model_len=10_000)) as client:
        for fields in (
            {"prompt_logprobs": count},
            {"logprobs": True, "top_logprobs": count} if chat else {"logprobs": count},
        ):
            status, error = await client.refused(path, text | fields)
            assert (status, error["param"]) == (400, list(fields)[-1])
        await client.complete(prompt="hi")


@pytest.mark.parametrize("scores", [{"echo": True, "logprobs": 3}, {"prompt_logprobs": 3}])
async def test_scores_of_prompts_have_a_limit(scores: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("services.gateway.completions.MAX_PROMPT_LOGPROBS", 2 * 50 * 5 * 4)
    async with serve() as client:
        fields = {"prompt": [[20] * 50] * 2, "max_tokens": 1, **scores}
        await client.complete(**fields, n=5)
        status, error = await client.refused("/v1/completions", fields | {"n": 6})
        assert (status, error["param"]) == (400, "prompt_logprobs")
        assert "2400" in error["message"]
        assert "2000" in error["message"]
        await client.complete(prompt=[[20] * 50] * 2, n=6, logprobs=3)  # none of prompts
