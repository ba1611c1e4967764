"""Tests of the limits of requests: a value beyond one gets an error with its field, and the next request is served."""

import asyncio
import io
import json
import threading
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import msgspec
import pytest

from services.gateway import ignored_fields
from services.gateway.api_requests import ChatRequest
from services.gateway.config import GatewayConfig
from services.gateway.prompt import chat_prompt
from services.gateway.served_model import ServedModel
from services.gateway.unsupported_fields import HINTS, NEUTRAL_VALUES, STREAM_HINTS
from shared.protocol import pack_token_set
from shared.text.sampling_defaults import SamplingDefaults
from shared.text.template import ChatTemplate
from shared.text.tokenizer import Tokenizer
from tests.gateway.fakes import EOS, TOKENIZER, VOCAB, Client, FakeBackend, endless, ids, says, serve, texts
from tests.text.vocabulary import CHATML, make_backend, write_model_folder
from tests.waiting import PATIENCE

PATHS = ["/v1/completions", "/v1/chat/completions"]
USER = {"role": "user", "content": "hi"}


def body(path: str, **fields: Any) -> dict[str, Any]:
    return ({"prompt": "hi"} if path == PATHS[0] else {"messages": [USER]}) | fields


async def refuses(client: Client, path: str, fields: dict[str, Any], param: str | None = None, words: str = "") -> None:
    """Check that a body gets 400 with these words, and that a good request after it is served."""
    status, error = await client.refused(path, fields)
    assert status == 400, error
    assert error["type"] == "BadRequestError"
    assert param is None or error["param"] == param, error
    assert words in error["message"]
    await client.complete(prompt="hi")


@pytest.mark.parametrize("length", [254, 255])
@pytest.mark.parametrize("max_tokens", [1, 2, None])
@pytest.mark.parametrize("extra", [{}, {"prompt_logprobs": 1}])
async def test_up_to_the_context(length: int, max_tokens: int | None, extra: dict[str, Any]) -> None:
    """LIM-01."""
    async with serve(FakeBackend(endless)) as client:
        fields = {"prompt": [20] * length, "max_tokens": max_tokens, **extra}
        if max_tokens is not None and length + max_tokens > 256:
            await refuses(client, PATHS[0], fields)
            return
        usage = (await client.complete(**fields))["usage"]
        assert usage["prompt_tokens"] == length
        assert usage["completion_tokens"] == (max_tokens or 256 - length)


@pytest.mark.parametrize(("length", "max_tokens"), [(256, 1), (256, None), (257, 1), (257, None), (257, 0)])
async def test_beyond_the_context(length: int, max_tokens: int | None) -> None:
    """LIM-01."""
    async with serve() as client:
        await refuses(client, PATHS[0], {"prompt": [20] * length, "max_tokens": max_tokens}, "prompt", "256")


@pytest.mark.parametrize("length", [254, 255, 256, 257])
@pytest.mark.parametrize("max_tokens", [1, 2, None])
async def test_the_same_rule_for_chats(length: int, max_tokens: int | None) -> None:
    """LIM-01."""
    async with serve(FakeBackend(endless), template="{{ messages[0].content }}") as client:
        fields = {"messages": [{"role": "user", "content": " two" * length}], "max_tokens": max_tokens}
        if length + (max_tokens or 1) > 256:
            await refuses(client, PATHS[1], fields, words="256")
            return
        usage = (await client.chat(**fields, prompt_logprobs=1))["usage"]
        assert usage["prompt_tokens"] == length
        assert usage["completion_tokens"] == (max_tokens or 256 - length)


async def test_a_prompt_of_the_whole_context_can_be_scored() -> None:
    """LIM-01."""
    async with serve() as client:
        whole = await client.complete(prompt=[20] * 256, max_tokens=0, prompt_logprobs=0)
        assert len(whole["choices"][0]["prompt_logprobs"]) == 256


@pytest.mark.parametrize("path", PATHS)
async def test_the_message_has_the_numbers(path: str) -> None:
    """LIM-02."""
    async with serve(FakeBackend(max_model_len=512)) as client:
        length = 8 if path == PATHS[0] else (await client.chat())["usage"]["prompt_tokens"]
        fields = body(path, max_tokens=510) | ({"prompt": [20] * 8} if path == PATHS[0] else {})
        status, error = await client.refused(path, fields)
        assert status == 400
        assert all(str(number) in error["message"] for number in (512, length, 510))
        assert (error["type"], error["param"]) == ("BadRequestError", "max_tokens")


@pytest.mark.parametrize("prompt", ["", [""], ["", "x"], [], [[]], [[], [1]]])
async def test_a_prompt_without_tokens(prompt: Any) -> None:
    """LIM-03."""
    async with serve() as client:
        await refuses(client, PATHS[0], {"prompt": prompt}, "prompt", "empty")


async def test_a_chat_without_tokens() -> None:
    """LIM-03."""
    async with serve() as client:
        await refuses(client, PATHS[1], {"messages": []}, "messages", "empty")
    async with serve(template="{% if false %}x{% endif %}") as client:
        await refuses(client, PATHS[1], {"messages": [USER]}, "messages", "empty")


@pytest.mark.parametrize(
    ("prompt", "name"),
    [([2**62], str(2**62)), ([-1], "-1"), ([VOCAB], f"{VOCAB}, which is out of vocabulary"), ([1.5], "prompt[0]"),
     ([1, "a"], "int and str"), ([True], "prompt[0]"), ([[1, [2]]], "prompt[0][1]"),
     ([[[1]]], "prompt[0][0]"), ([1, [2]], "int and list"),
     (5, "prompt"), (None, "prompt")],
)  # fmt: skip
async def test_what_is_no_token_id(prompt: Any, name: str) -> None:
    """LIM-05."""
    async with serve() as client:
        await refuses(client, PATHS[0], {"prompt": prompt}, words=name)


async def test_the_last_id_of_the_vocabulary_is_one() -> None:
    """LIM-05."""
    backend = FakeBackend()
    async with serve(backend) as client:
        await client.complete(prompt=[VOCAB - 1, 0])
    assert backend.requests[0].tokens == [VOCAB - 1, 0]


@pytest.mark.parametrize("path", PATHS)
async def test_ten_thousand_tokens_are_refused_at_once_and_those_behind_are_served(path: str) -> None:
    """LIM-06."""
    backend = FakeBackend()
    prompt: Any = [20] * 10_000 if path == PATHS[0] else "x " * 10_000
    fields = {"prompt": prompt} if path == PATHS[0] else {"messages": [{"role": "user", "content": prompt}]}
    async with serve(backend) as client, asyncio.timeout(PATIENCE), asyncio.TaskGroup() as group:
        started = time.process_time()
        long = group.create_task(client.refused(path, fields))
        behind = [group.create_task(client.complete(prompt="hi", max_tokens=3)) for _ in range(5)]
        status, error = await long
        assert status == 400
        assert time.process_time() - started < 5, "about a second"
        assert "256" in error["message"]
        answers = [await task for task in behind]
        assert [answer["choices"][0]["finish_reason"] for answer in answers] == ["length"] * 5
    assert [len(request.tokens) for request in backend.requests] == [len(ids("hi"))] * 5, "it never reached an engine"


@pytest.mark.parametrize("extra", [{}, {"max_tokens": None}, {"max_completion_tokens": None}])
async def test_a_chat_without_max_tokens_has_the_rest_of_the_context(extra: dict[str, Any]) -> None:
    """LIM-08."""
    async with serve(FakeBackend(endless, max_model_len=300)) as client:
        answer = await client.chat(**extra)
        assert answer["usage"]["total_tokens"] == 300
        assert answer["choices"][0]["finish_reason"] == "length"


@pytest.mark.parametrize("extra", [{}, {"max_tokens": None}])
async def test_a_completion_without_max_tokens_has_sixteen(extra: dict[str, Any]) -> None:
    """LIM-08."""
    async with serve(FakeBackend(endless)) as client:
        assert (await client.complete(prompt="x", **extra))["usage"]["completion_tokens"] == 16


async def test_max_completion_tokens_wins() -> None:
    async with serve(FakeBackend(endless)) as client:
        answer = await client.chat(max_tokens=9, max_completion_tokens=3)
        assert answer["usage"]["completion_tokens"] == 3


@pytest.mark.parametrize(("top_k", "default", "own"), [(0, 0, 5), (None, 0, 5), (1, 1, 5), (1, 1, 0)])
async def test_the_models_own_sampling_is_used_unless_a_request_has_its_own(
    top_k: int | None, default: int, own: int, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """SMP-07: 0 and null are off; the log says what requests get."""
    folder = write_model_folder(tmp_path / "model", generation={"top_k": top_k, "temperature": 0.7})
    with caplog.at_level("INFO"):
        model = ServedModel.load(GatewayConfig(model=str(folder)))
        model.log_choices()
    defaults = model.defaults
    assert "sampling defaults: temperature 0.7" + ("" if top_k is None else f", top_k {top_k}") in caplog.text
    backend = FakeBackend()
    async with serve(backend, defaults=defaults) as client:
        await client.complete(prompt="x")
        await client.chat()
        await client.complete(prompt="x", top_k=own, temperature=0.3)
        await client.chat(top_k=own, temperature=0.3)
    sampled = [(request.sampling.top_k, request.sampling.temperature) for request in backend.requests]
    assert sampled == [(default, 0.7)] * 2 + [(own, 0.3)] * 2


async def test_the_models_own_default_length_is_used() -> None:
    async with serve(FakeBackend(endless), defaults=SamplingDefaults(max_tokens=5)) as client:
        assert (await client.chat())["usage"]["completion_tokens"] == 5
        assert (await client.complete(prompt="x"))["usage"]["completion_tokens"] == 5
        assert (await client.complete(prompt=[20] * 253))["usage"]["completion_tokens"] == 3


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("n", [0, -1, 129, 10**6, 10**9])
async def test_n_has_a_limit(path: str, n: int) -> None:
    """LIM-10."""
    async with serve() as client:
        await refuses(client, path, body(path, n=n), "n", "128")


async def test_prompts_times_n_have_a_limit() -> None:
    """LIM-10."""
    async with serve() as client:
        await refuses(client, PATHS[0], {"prompt": [[20]] * 64, "n": 64}, "prompt", "1024")
        await refuses(client, PATHS[0], {"prompt": [[20]] * 1025}, "prompt", "1024")


async def test_samples_of_a_request_say_how_many_come_before() -> None:
    """LOOP-02: this lets an engine serve other requests in between."""
    backend = FakeBackend()
    async with serve(backend) as client:
        await client.complete(prompt=["a", "b", "c"], n=4, max_tokens=1)
        await client.chat(n=4, max_tokens=1)
    assert [request.samples_before for request in backend.requests] == [0, 4, 8, 0]


async def test_lists_that_each_prompt_carries_have_a_limit_together() -> None:
    """LOOP-01: a thousand prompts with a thousand stop tokens each would be a million to check and to send."""
    async with serve() as client:
        stops = [5] * 1000
        await client.complete(prompt=["a"] * 60, stop_token_ids=stops, max_tokens=1)
        await refuses(client, PATHS[0], {"prompt": ["a"] * 70, "stop_token_ids": stops}, "prompt", "65536")
        await refuses(client, PATHS[0], {"prompt": ["a"] * 70, "allowed_token_ids": stops}, "prompt", "65536")
        words = [chr(ord("a") + at) * 60 for at in range(26)]  # some 3,000 tokens
        await client.complete(prompt=["a"] * 20, bad_words=words, max_tokens=1)
        await refuses(client, PATHS[0], {"prompt": ["a"] * 30, "bad_words": words}, "prompt", "65536")


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("stop_token_ids", [1] * 1025),
        ("stop", ["a"] * 5),
        ("stop", "a" * 1025),
        ("logit_bias", {str(at): 1 for at in range(16_385)}),
        ("allowed_token_ids", [1] * 262_145),
        ("bad_words", ["a"] * 129),
        ("bad_words", ["a" * 257]),
    ],
    ids=["stop_token_ids", "stop", "long stop", "logit_bias", "allowed_token_ids", "bad_words", "long bad word"],
)
async def test_lists_and_strings_have_a_limit(path: str, field: str, value: Any) -> None:
    """LOOP-01: the number is checked before anything loops over them, and is in the error."""
    async with serve() as client:
        await refuses(client, path, body(path, **{field: value}), field, "at most")


@pytest.mark.parametrize(
    "text",
    [
        '"' * 300_000,
        "[{," * 400_000,
        "\\" * 600_000,
        '\\"' * 300_000,
        '\\\\"' * 100_000,
        "\\\\" + '[{"' * 40_000,
        "\n" * 600_000,
    ],
    ids=range(7),
)
async def test_what_is_inside_of_strings_does_not_count(text: str) -> None:
    """LOOP-01: a text of commas and brackets is one value, however it is escaped."""
    async with serve(FakeBackend(max_model_len=2_000_000)) as client:
        data = json.dumps({"prompt": text, "max_tokens": 1}).encode()
        async with client.post(
            PATHS[0], data=io.BytesIO(data), headers={"Content-Type": "application/json"}
        ) as response:
            assert response.status == 200, await response.text()


@pytest.mark.parametrize("item", ["[],", "{},", '"\\\\",', '"[",', '"\\"",', '"a":"\\\\\\"",'])
async def test_values_of_a_body_are_counted(item: str) -> None:
    """LOOP-01: more than any request needs are refused before they are built."""
    listed = "[" + item * 150_000 + "1]" if ":" not in item else "{" + item * 150_000 + '"b":1}'
    data = f'{{"prompt": "x", "unknown": {listed}}}'.encode()
    async with serve() as client:
        assert json.loads(data)
        status, error = await client.refused(PATHS[0], io.BytesIO(data))
        assert (status, "at most" in error["message"] or "more than" in error["message"]) == (400, True)
        assert "the body holds" in error["message"]


@pytest.mark.parametrize(
    "message",
    [
        lambda text: {"tool_calls": [{"function": {"name": "f", "arguments": text}}]},
        lambda text: {"tool_calls": [{"function": {"name": "f", "arguments": text[: 6 + 3 * 13_000] + "1]}"}}] * 12},
        lambda text: {"tool_calls": [{"name": "f", "arguments": text}]},
        lambda text: {"function_call": {"name": "f", "arguments": text}},
    ],
    ids=["one", "many", "bare", "function_call"],
)
async def test_values_inside_of_tool_calls_are_counted(message: Any) -> None:
    """Arguments are JSON in a string, which is decoded too: a million lists there cost as much as in the body."""
    text = '{"a":[' + "[]," * 150_000 + "1]}"
    async with serve() as client:
        fields = {"messages": [USER, {"role": "assistant", "content": "x"} | message(text)]}
        await refuses(client, PATHS[1], fields, words="lists and objects")


async def test_a_long_prompt_is_never_cut() -> None:
    """LIM-12."""
    backend = FakeBackend()
    async with serve(backend) as client:
        await refuses(client, PATHS[0], {"prompt": "x y " * 256}, "prompt")
        history = [USER, {"role": "assistant", "content": "x y " * 200}, USER]
        await refuses(client, PATHS[1], {"messages": history}, "messages")
        usage = (await client.complete(prompt="hello six"))["usage"]
        assert usage["prompt_tokens"] == len(ids("hello six")) == len(backend.requests[-1].tokens)


async def test_long_texts_are_tokenized_too() -> None:
    """LIM-12."""
    async with serve(FakeBackend(max_model_len=100_000)) as client:
        text = "hello " * 5000
        assert (await client.complete(prompt=text))["usage"]["prompt_tokens"] == len(ids(text))


async def test_ids_that_only_pad_the_vocabulary_are_no_text() -> None:
    """SMP-19: a model has more tokens than its tokenizer, and may sample one; they can be sent back."""
    padding = [TOKENIZER.vocab_size, VOCAB - 1]
    backend = FakeBackend(says([padding[0], *ids("one"), padding[1], *ids(" two")]))
    async with serve(backend) as client:
        choice = (await client.complete(prompt="hi", logprobs=2))["choices"][0]
        assert choice["text"] == "one two"
        assert choice["logprobs"]["tokens"] == ["", "one", "", " two", "</s>"]
        chunks = await client.stream_chat(logprobs=True, top_logprobs=2)
        assert texts(chunks) == {0: "one two"}
        again = [*ids("hi"), padding[0], *ids("one"), padding[1]]
        answer = await client.complete(prompt=again, echo=True, max_tokens=0, logprobs=1)
        assert answer["choices"][0]["text"] == "hione"
        assert answer["usage"]["prompt_tokens"] == len(again)
    assert backend.requests[-1].tokens == again


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("seed", [2**64, -(2**63) - 1, 1.5, "x", 2**63])
async def test_seeds_that_are_none(path: str, seed: Any) -> None:
    """SMP-04."""
    async with serve() as client:
        await refuses(client, path, body(path, seed=seed), "seed")


async def test_seeds_at_the_limits_and_unseeded_requests() -> None:
    """SMP-04."""
    backend = FakeBackend()
    async with serve(backend) as client:
        for seed in (2**63 - 1, -(2**63), 5.0, 7, None, -1, None):
            await client.complete(prompt="x", seed=seed)
    seeds = [request.sampling.seed for request in backend.requests]
    assert seeds[:4] == [2**63 - 1, 2**63, 5, 7]
    assert len(set(seeds)) == 7  # each unseeded request has its own


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize(
    ("field", "value"),
    [("repetition_penalty", 0), ("repetition_penalty", -1), ("presence_penalty", 3), ("frequency_penalty", -3),
     ("min_p", 1.5), ("top_p", 0), ("top_p", 1.1), ("temperature", -1), ("temperature", 2.1), ("top_k", -2),
     ("top_k", 1.5), ("min_tokens", -1), ("max_tokens", -1), ("prompt_logprobs", 21), ("priority", 2**63)],
)  # fmt: skip
async def test_out_of_range_is_refused_by_name(path: str, field: str, value: Any) -> None:
    """SMP-12."""
    async with serve() as client:
        await refuses(client, path, body(path, **{field: value}), field, field)


async def test_infinity_is_no_json_and_tiny_penalties_are_fine() -> None:
    """SMP-12."""
    async with serve() as client:
        status, error = await client.refused(PATHS[0], b'{"prompt": "x", "repetition_penalty": Infinity}')
        assert (status, "JSON" in error["message"]) == (400, True)
        await client.complete(prompt="x", repetition_penalty=1e-9)


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("bias", [{str(VOCAB): -100}, {"-1": 5}, {"abc": 1}, {"10": 1000}, {"10": "x"}, {"9" * 30: 1}])
async def test_a_bias_on_nothing(path: str, bias: dict[str, Any]) -> None:
    """SMP-16: HTTP-09: the error names the key and the valid range."""
    (key,) = bias
    async with serve() as client:
        fields = body(path, logit_bias={"1": 1, **bias})
        await refuses(client, path, fields, "logit_bias", key)
        value = bias[key]
        await refuses(client, path, fields, "logit_bias", _range_of_bias(value))


def _range_of_bias(value: Any) -> str:
    if isinstance(value, str):
        return "must be a number"
    return "between -100 and 100" if abs(value) > 100 else f"from 0 to {VOCAB - 1}"


@pytest.mark.parametrize("path", PATHS)
async def test_a_valid_bias_reaches_the_engine(path: str) -> None:
    """SMP-16."""
    backend = FakeBackend()
    async with (
        serve(backend) as client,
        client.post(path, json=body(path, logit_bias={"10": -100, "3": 5})) as response,
    ):
        assert response.status == 200
    assert backend.requests[0].sampling.logit_bias == [(3, 5.0), (10, -100.0)]


@pytest.mark.parametrize("path", PATHS)
async def test_allowed_tokens_and_bad_words_reach_the_engine(path: str) -> None:
    backend = FakeBackend()
    fields = body(path, allowed_token_ids=[VOCAB - 1, 3, EOS, 3], bad_words=["two", "\n"])
    async with serve(backend) as client, client.post(path, json=fields) as response:
        assert response.status == 200
    (request,) = backend.requests
    assert request.sampling.allowed_tokens == pack_token_set([EOS, 3, VOCAB - 1])
    assert request.sampling.bad_words == [ids("two"), ids(" two"), ids("\n")]


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize(
    ("ids", "param", "words"),
    [
        ([VOCAB], "logprob_token_ids", f"from 0 to {VOCAB - 1}"),
        ([3, -1], "logprob_token_ids", f"from 0 to {VOCAB - 1}"),
        ([3] * 129, "logprob_token_ids", "at most 128 token ids, got 129"),
        (["3"], "logprob_token_ids[0]", ""),
    ],
)
async def test_named_tokens_are_few_and_of_the_vocabulary(path: str, ids: list[Any], param: str, words: str) -> None:
    async with serve() as client:
        await refuses(client, path, body(path, logprobs=path == PATHS[1] or 0, logprob_token_ids=ids), param, words)


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize(
    ("fields", "param", "words"),
    [
        ({"allowed_token_ids": []}, "allowed_token_ids", "must not be empty"),
        ({"allowed_token_ids": [VOCAB]}, "allowed_token_ids", f"from 0 to {VOCAB - 1}"),
        ({"allowed_token_ids": [-1, 5]}, "allowed_token_ids", f"from 0 to {VOCAB - 1}"),
        ({"allowed_token_ids": [2**70]}, "allowed_token_ids", f"from 0 to {VOCAB - 1}"),
        ({"allowed_token_ids": ["5"]}, "allowed_token_ids[0]", ""),
        ({"allowed_token_ids": [EOS], "min_tokens": 1}, "min_tokens", "min_tokens forbids"),
        ({"allowed_token_ids": [EOS, 3], "bad_words": ["</s>", "<|im_end|>"]}, "bad_words", "rule out all"),
        ({"bad_words": [""]}, "bad_words", "empty"),
        ({"bad_words": "two"}, "bad_words", ""),
        ({"bad_words": [5]}, "bad_words[0]", ""),
        ({"bad_words": ["x" * 100]}, "bad_words", "at most 64 tokens"),
        ({"bad_words": [f"{at:03}" for at in range(65)]}, "bad_words", "at most 128 sequences of tokens, got 130"),
    ],
)
async def test_tokens_that_leave_nothing_or_are_none(path: str, fields: dict[str, Any], param: str, words: str) -> None:
    async with serve() as client:
        await refuses(client, path, body(path, **fields), param, words)


async def test_many_bad_words_are_tokenized_off_the_loop_and_few_on_it(monkeypatch: pytest.MonkeyPatch) -> None:
    threads: list[bool] = []
    encode_all = Tokenizer.encode_all

    def note_thread(self: Tokenizer, texts: Sequence[str], add_special_tokens: bool = True) -> list[list[int]]:
        if len(texts) > 1:
            threads.append(threading.current_thread() is threading.main_thread())
        return encode_all(self, texts, add_special_tokens)

    monkeypatch.setattr(Tokenizer, "encode_all", note_thread)
    async with serve() as client:
        await client.complete(prompt="x", bad_words=["two"])
        await refuses(client, PATHS[0], {"prompt": "x", "bad_words": ["y" * 256] * 100}, "bad_words")
    assert threads == [True, False]


@pytest.mark.parametrize("path", PATHS)
async def test_a_salt_reaches_the_engine(path: str) -> None:
    backend = FakeBackend()
    async with serve(backend) as client:
        for salt in ("x", "ä/@\0" * 32, None):
            async with client.post(path, json=body(path, cache_salt=salt)) as response:
                assert response.status == 200
        for wrong in ("", "x" * 129, 5, ["x"]):
            await refuses(client, path, body(path, cache_salt=wrong), "cache_salt")
        half = json.dumps(body(path, cache_salt="\ud800")).encode()  # of a surrogate pair, which is no text
        assert (await client.refused(path, half))[0] == 400
    assert [request.cache_salt for request in backend.requests if request.cache_salt] == ["x", "ä/@\0" * 32]


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("tokens", [[VOCAB + 5], [-3], [2**70], ["x"], [1.5]])
async def test_stop_tokens_beyond_the_vocabulary(path: str, tokens: list[Any]) -> None:
    """SMP-18."""
    async with serve() as client:
        await refuses(client, path, body(path, stop_token_ids=tokens, min_tokens=4), words="stop_token_ids")


@pytest.mark.parametrize("path", PATHS)
async def test_extra_fields_reach_the_engine(path: str) -> None:
    """SMP-22."""
    backend = FakeBackend()
    fields = {
        "top_k": 7.0, "min_p": 0.1, "top_p": 0.9, "temperature": 0.5, "repetition_penalty": 1.1, "min_tokens": 2,
        "presence_penalty": 0.3, "frequency_penalty": -0.3, "ignore_eos": True, "stop_token_ids": [9, 8], "n": 2,
        "max_tokens": 4, "priority": -3, "response_format": {"type": "text"},
    }  # fmt: skip
    async with serve(backend) as client, client.post(path, json=body(path, **fields)) as response:
        assert response.status == 200
    (request,) = backend.requests
    sampling = request.sampling
    assert (sampling.top_k, sampling.min_p, sampling.top_p, sampling.temperature) == (7, 0.1, 0.9, 0.5)
    assert (sampling.presence_penalty, sampling.frequency_penalty) == (0.3, -0.3)
    assert (sampling.repetition_penalty, sampling.min_tokens, sampling.max_tokens) == (1.1, 2, 4)
    assert sampling.stop_token_ids == [9, 8]
    assert (request.n, request.priority) == (2, -3)


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("field", ["foo", "best_off", "top_logprob", "maximum"])
async def test_an_unknown_field_is_refused_by_name_if_asked_for(path: str, field: str) -> None:
    """SMP-22."""
    async with serve(strict_fields=True) as client:
        await refuses(client, path, body(path, **{field: None}), field, f"{field} is not a field")
        nested = body(path, stream=True, stream_options={field: 1})
        await refuses(client, path, nested, f"stream_options.{field}", f"stream_options.{field} is not a field")


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("path", PATHS)
async def test_unknown_fields_are_ignored_and_named(
    path: str, stream: bool, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """HTTP-06: a header of every response names the unknown fields, and the log does once."""
    monkeypatch.setattr(ignored_fields, "_logged", set())
    fields = body(path, stream=stream, foo=1, response_format={"type": "text", "strict": True}) | {"gr\r\nün,": [{}]}
    if stream:
        fields["stream_options"] = {"include_usage": False, "include_what": True}
    async with serve() as client:
        for _ in range(2):
            async with client.post(path, json=fields) as response:
                assert response.status == 200
                named = set(response.headers["X-Quire-Ignored-Fields"].split(", "))
        expected = {"foo", "gr%0D%0A%C3%BCn%2C", "response_format.strict"}
        assert named == expected | ({"stream_options.include_what"} if stream else set())
        async with client.post(path, json=body(path, foo=1, temperature=9)) as response:
            assert (response.status, response.headers["X-Quire-Ignored-Fields"]) == (400, "foo")
        async with client.post(path, json=body(path)) as response:
            assert "X-Quire-Ignored-Fields" not in response.headers
    logged = [record.getMessage() for record in caplog.records]
    assert sorted(sum(f"field {name}," in line for line in logged) for name in named) == [1] * len(named)


async def test_reports_of_unknown_fields_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    """HTTP-06: header and log stay short, whatever the names are."""
    monkeypatch.setattr(ignored_fields, "_logged", set())
    fields = {"\u00e9" * 300 + str(at): 1 for at in range(400)}
    async with serve() as client, client.post(PATHS[0], json=body(PATHS[0]) | fields) as response:
        assert response.status == 200
        assert len(response.headers["X-Quire-Ignored-Fields"]) < 8000
    assert len(ignored_fields._logged) <= 1000


@pytest.mark.parametrize("value", [True, False, 0, "flex", {"a": "b"}, [], None])
@pytest.mark.parametrize("path", PATHS)
async def test_hints_are_taken_in_silence(path: str, value: Any) -> None:
    """HTTP-06: fields that cannot change the text are accepted with any value, even by strict servers."""
    hints = dict.fromkeys(HINTS, value)
    async with serve(strict_fields=True) as client:
        fields = body(path, stream=True, stream_options=dict.fromkeys(STREAM_HINTS, value), **hints)
        async with client.post(path, json=fields) as response:
            assert response.status == 200, await response.text()
            assert "X-Quire-Ignored-Fields" not in response.headers


@pytest.mark.parametrize(
    ("path", "fields", "param"),
    [
        (PATHS[0], {"suffix": "x"}, "suffix"),
        (PATHS[0], {"best_of": 2}, "best_of"),
        (PATHS[1], {"tool_choice": "required"}, "tool_choice"),
        (PATHS[1], {"tool_choice": {"type": "function"}}, "tool_choice"),
        (PATHS[1], {"chat_template_kwargs": {"messages": []}}, "chat_template_kwargs"),
        (PATHS[1], {"messages": [{"role": "user", "content": 1}]}, "messages[0].content"),
        (PATHS[0], {"stream": True, "prompt_logprobs": 1}, "prompt_logprobs"),
        (PATHS[1], {"length_penalty": True}, "length_penalty"),
        (PATHS[1], {"best_of": 3, "n": 2}, "best_of"),
        (PATHS[1], {"suffix": "x"}, "suffix"),
        (PATHS[0], {"tools": [{"type": "function"}]}, "tools"),
        (PATHS[1], {"store": False, "temperature": 9}, "temperature"),
    ],
)
async def test_what_is_not_supported_is_refused_by_name(path: str, fields: dict[str, Any], param: str) -> None:
    async with serve() as client:
        await refuses(client, path, body(path) | fields, param)


SUPPORTED = {PATHS[1]: {"tools", "tool_choice", "documents", "chat_template", "return_prompt_text"}}
"""Fields that one of the endpoints has."""


@pytest.mark.parametrize("path", PATHS)
async def test_fields_that_others_have_are_said_not_to_be_supported(path: str) -> None:
    async with serve() as client:
        for name in NEUTRAL_VALUES.keys() - SUPPORTED.get(path, set()):
            await refuses(client, path, body(path, **{name: "x"}), name, f"{name} is not supported")


@pytest.mark.parametrize(
    ("path", "fields"),
    [
        (PATHS[0], {"suffix": "", "best_of": 2, "n": 2}),
        (PATHS[0], {"best_of": 1}),
        (PATHS[1], {"tools": [], "tool_choice": "none", "parallel_tool_calls": True}),
        (PATHS[1], {"tool_choice": "auto"}),
        (PATHS[0], {"temperature": 0, "n": 3}),
        *((path, dict.fromkeys(NEUTRAL_VALUES)) for path in PATHS),
        *((PATHS[0], dict.fromkeys(NEUTRAL_VALUES, empty)) for empty in ([], {}, "")),
        (PATHS[1], {name: values[0] for name, values in NEUTRAL_VALUES.items() if values}),
        (PATHS[0], {"service_tier": "default", "store": False, "logit_bias": {"5": 1}}),
    ],
)
async def test_what_changes_nothing_is_taken(path: str, fields: dict[str, Any]) -> None:
    async with serve() as client, client.post(path, json=body(path) | fields) as response:
        assert response.status == 200


async def test_the_models_defaults_are_used_and_a_request_wins_over_them() -> None:
    backend = FakeBackend()
    async with serve(backend, defaults=SamplingDefaults(temperature=0.2, top_k=3, repetition_penalty=1.2)) as client:
        await client.complete(prompt="x")
        await client.chat(temperature=0.9, top_k=0)
    first, second = (request.sampling for request in backend.requests)
    assert (first.temperature, first.top_k, first.repetition_penalty) == (0.2, 3, 1.2)
    assert (second.temperature, second.top_k, second.repetition_penalty) == (0.9, 0, 1.2)


async def test_without_the_models_defaults_vllms_are_used() -> None:
    backend = FakeBackend()
    async with serve(backend) as client:
        await client.chat()
    sampling = backend.requests[0].sampling
    assert (sampling.temperature, sampling.top_p, sampling.top_k, sampling.min_p) == (1.0, 1.0, 0, 0.0)


class Recorder(Tokenizer):
    """A tokenizer that notes its thread, and the texts of each call."""

    def __init__(self) -> None:
        super().__init__(make_backend(), special=TOKENIZER.special, eos_token_ids=TOKENIZER.eos_token_ids)
        self.calls: list[tuple[bool, list[str]]] = []

    def encode_all(self, texts: Sequence[str], add_special_tokens: bool = True) -> list[list[int]]:
        self.calls.append((threading.current_thread() is threading.main_thread(), list(texts)))
        return super().encode_all(texts, add_special_tokens)


@pytest.mark.parametrize("path", PATHS)
async def test_a_text_that_cannot_fit_is_refused_before_it_is_tokenized(path: str) -> None:
    tokenizer = Recorder()
    most = tokenizer.max_characters(256)
    async with serve(tokenizer=tokenizer) as client:
        for length, tokenized in ((most - 100, True), (most + 1, False)):
            text = "x" * length
            fields = {"prompt": text} if path == PATHS[0] else {"messages": [{"role": "user", "content": text}]}
            tokenizer.calls.clear()
            await refuses(client, path, fields, next(iter(fields)), "256" if tokenized else str(most))
            assert any(text in one for _, texts in tokenizer.calls for one in texts) is tokenized


async def test_many_prompts_are_tokenized_off_the_loop_and_few_on_it() -> None:
    tokenizer = Recorder()
    async with serve(FakeBackend(max_model_len=40_000), tokenizer=tokenizer) as client:
        answer = await client.complete(prompt=["ab", "c" * 30_000], max_tokens=1)
        assert answer["usage"]["prompt_tokens"] == 30_002
        assert tokenizer.calls == [(False, ["ab", "c" * 30_000])]
        tokenizer.calls.clear()
        await client.complete(prompt=["ab", "c"], max_tokens=1)
        assert tokenizer.calls == [(True, ["ab", "c"])]


async def test_tokenizing_goes_by_groups_and_ends_with_the_first_prompt_that_is_too_long(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("services.gateway.prompt.MAX_BATCH", 1000)
    tokenizer = Recorder()
    prompts = [letter * 400 for letter in "abcde"]
    async with serve(FakeBackend(max_model_len=401), tokenizer=tokenizer) as client:
        answer = await client.complete(prompt=prompts, max_tokens=1)
        assert answer["usage"]["prompt_tokens"] == 2000
        assert [texts for _, texts in tokenizer.calls] == [prompts[:2], prompts[2:4], prompts[4:]]
    tokenizer.calls.clear()
    async with serve(FakeBackend(max_model_len=399), tokenizer=tokenizer) as client:
        await refuses(client, PATHS[0], {"prompt": prompts}, "prompt", "399")
        assert [texts for _, texts in tokenizer.calls] == [prompts[:2], ["hi"]]


async def test_more_messages_than_the_context_has_tokens_are_not_rendered() -> None:
    template = "{% if messages | length > 256 %}{{ raise_exception('rendered') }}{% endif %}x"
    async with serve(template=template) as client:
        await client.chat(messages=[USER] * 256)
        await refuses(client, PATHS[1], {"messages": [USER] * 257}, "messages", "257 messages")


@pytest.mark.parametrize(
    ("fields", "on_loop"),
    [
        ({"messages": [USER] * 64}, True),
        ({"messages": [USER] * 65}, False),
        ({"messages": [{"role": "user", "content": "x" * 20_000}]}, False),
        ({"messages": [{"role": "user", "content": [{"type": "text", "text": "x"}]}]}, False),
        ({"messages": [USER], "chat_template_kwargs": {"a": [1]}}, False),
    ],
)
async def test_what_may_take_long_is_rendered_off_the_loop(fields: dict[str, Any], on_loop: bool) -> None:
    threads: list[bool] = []

    class Template(ChatTemplate):
        def render(self, messages: Sequence[Any], **options: Any) -> str:
            threads.append(threading.current_thread() is threading.main_thread())
            return super().render(messages, **options)

    request = msgspec.convert(fields, ChatRequest)
    variables = request.chat_template_kwargs or {}
    await chat_prompt(request, TOKENIZER, Template(CHATML), variables=variables, max_model_len=40_000)
    assert threads == [on_loop]


async def test_a_server_may_allow_fewer_log_probabilities() -> None:
    """API-02: --max-logprobs."""
    async with serve(max_logprobs=2) as client:
        await client.complete(prompt="a", logprobs=2)
        for path, extra, named in (
            ("/v1/completions", {"prompt": "a", "logprobs": 3}, "logprobs"),
            ("/v1/completions", {"prompt": "a", "prompt_logprobs": 3}, "prompt_logprobs"),
            ("/v1/chat/completions", {"messages": [USER], "logprobs": True, "top_logprobs": 3}, "top_logprobs"),
        ):
            status, error = await client.refused(path, extra)
            assert (status, error["param"]) == (400, named)
            assert error["message"] == f"{named} must be at most 2 (--max-logprobs), got 3"
