"""Tests of /tokenize, /detokenize, /tokenizer_info and /load."""

import io
from pathlib import Path
from typing import Any

import msgspec
import pytest
from aiohttp.test_utils import TestServer
from hypothesis import given
from hypothesis import strategies as st

from services.gateway.api_responses import DetokenizeResponse, LoadResponse, TokenizeResponse
from services.gateway.app import make_app
from services.gateway.bounds import MAX_TOKENS
from services.gateway.served_model import ServedModel
from shared.errors import Unavailable
from tests.gateway.documented import check
from tests.gateway.fakes import EOS, TOKENIZER, VOCAB, Client, FakeBackend, ids, make_gateway, serve
from tests.text.vocabulary import CHATML, WORDS, make_tokenizer, write_model_folder

TOOL = {"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}
SHOWS_ALL = (
    "{{ bos_token }}{% if tools %}{{ tools | tojson }}{% endif %}{{ documents }}{{ reasoning_effort }}{{ mood }}"
    + CHATML
)


async def tokenize(client: Client, **fields: Any) -> Any:
    """Return the answer of /tokenize, after a check of its form."""
    async with client.post("/tokenize", json=fields) as response:
        assert response.status == 200, await response.text()
        answer = await response.json()
    check(answer, TokenizeResponse)
    assert answer["count"] == len(answer["tokens"])
    return answer


async def detokenize(client: Client, **fields: Any) -> str:
    async with client.post("/detokenize", json=fields) as response:
        assert response.status == 200, await response.text()
        answer = await response.json()
    check(answer, DetokenizeResponse)
    return str(answer["prompt"])


@pytest.mark.parametrize("add_special_tokens", [True, False, None])
@pytest.mark.parametrize("prompt", ["one two three", " é\n\U0001f600", "<|im_start|>user", "x" * 200])
async def test_a_completions_tokens_are_those_that_the_engine_gets(prompt: str, add_special_tokens: bool) -> None:
    backend = FakeBackend()
    async with serve(backend, tokenizer=make_tokenizer(bos=True)) as client:
        fields = {"prompt": prompt, "add_special_tokens": add_special_tokens}
        answer = await tokenize(client, **fields)
        await client.complete(**fields)
    assert answer["tokens"] == backend.requests[0].tokens
    assert (answer["max_model_len"], answer["token_strs"]) == (256, None)


@pytest.mark.parametrize(
    "fields",
    [
        {},
        {"add_special_tokens": True},
        {"add_generation_prompt": False},
        {"add_generation_prompt": False, "continue_final_message": True},
        {"tools": [TOOL], "tool_choice": "none"},
        {"documents": [{"text": "one"}]},
        {"chat_template_kwargs": {"mood": "good"}},
        {"reasoning_effort": "low"},
        {"truncate_prompt_tokens": 3, "truncation_side": "right"},
        {"truncate_prompt_tokens": -1, "max_tokens": 250},
        {"chat_template": "{{ messages[0].content }}"},
        {"messages": [{"role": "user", "content": [{"type": "text", "text": "one"}, {"type": "text", "text": "two"}]}]},
    ],
)
async def test_a_chats_tokens_are_those_that_the_engine_gets(fields: dict[str, Any]) -> None:
    backend = FakeBackend()
    body = {"messages": [{"role": "user", "content": "hello"}]} | fields
    async with serve(
        backend, tokenizer=make_tokenizer(bos=True), template=SHOWS_ALL, trust_request_chat_template=True
    ) as client:
        plain = await tokenize(client, messages=body["messages"])
        answer = await tokenize(client, **body)
        await client.chat(**body)
    assert answer["tokens"] == backend.requests[0].tokens
    assert (answer["tokens"] != plain["tokens"]) == bool(fields.keys() - {"messages"})


async def test_fields_that_do_not_shape_the_prompt_have_no_effect() -> None:
    async with serve() as client:
        plain = await tokenize(client, prompt="one")
        assert await tokenize(client, prompt="one", temperature=0.5, stream=True, n=2, stop="x", user="me") == plain


async def test_the_tokens_are_shown_as_the_vocabulary_spells_them() -> None:
    async with serve() as client:
        answer = await tokenize(client, prompt="one two<|im_end|>é", return_token_strs=True)
    assert answer["token_strs"] == ["one", "Ġtwo", "<|im_end|>", "Ã", "©"]


async def test_a_prompt_may_be_empty_or_longer_than_the_context() -> None:
    async with serve() as client:
        assert (await tokenize(client, prompt=""))["tokens"] == []
        assert (await tokenize(client, prompt=" two" * 300))["count"] == 300
        messages = [{"role": "user", "content": " two" * 300}]
        assert (await tokenize(client, messages=messages))["count"] > 300
        for path, body in (("/v1/completions", {"prompt": ""}), ("/v1/completions", {"prompt": " two" * 300})):
            status, _ = await client.refused(path, body)
            assert status == 400


@pytest.mark.parametrize(
    ("body", "status", "param", "words"),
    [
        ({}, 400, "prompt", "prompt is missing"),
        ({"prompt": "x", "messages": []}, 400, "prompt", "only one of messages and prompt"),
        ({"prompt": ["x"]}, 400, "prompt", "Expected `str`"),
        ({"prompt": "x", "model": "other"}, 404, "model", "does not exist"),
        ({"prompt": "x", "return_token_strs": 1}, 400, "return_token_strs", "Expected `bool"),
        ({"prompt": "x" * 20_000}, 400, "prompt", "characters"),
        ({"messages": []}, 400, "messages", "must not be empty"),
        ({"messages": [{"content": "x"}]}, 400, "messages[0].role", "role must be a string"),
    ],
)
async def test_what_tokenize_refuses(body: dict[str, Any], status: int, param: str, words: str) -> None:
    async with serve() as client:
        found, error = await client.refused("/tokenize", body)
    assert (found, error["param"]) == (status, param)
    assert words in error["message"]


async def test_unknown_fields_are_named() -> None:
    async with serve() as client, client.post("/tokenize", json={"prompt": "x", "colour": 1}) as response:
        assert response.headers["X-Quire-Ignored-Fields"] == "colour"
    async with serve(strict_fields=True) as client:
        assert (await client.refused("/detokenize", {"tokens": [], "colour": 1}))[1]["param"] == "colour"


async def test_the_text_of_few_tokens_may_be_too_long(monkeypatch: pytest.MonkeyPatch) -> None:
    tokens = TOKENIZER.encode("one two three")
    monkeypatch.setattr("services.gateway.tokenization.MAX_TEXT", len(" one two three"))
    async with serve() as client:
        assert await detokenize(client, tokens=tokens) == "one two three"
        status, error = await client.refused("/detokenize", {"tokens": [*tokens, tokens[0]]})
    assert (status, error["param"]) == (400, "tokens")
    assert "at most 14 bytes" in error["message"]


async def test_detokenize_is_the_inverse() -> None:
    text = "one two <|im_start|>user\n é\U0001f600"
    async with serve() as client:
        tokens = (await tokenize(client, prompt=text))["tokens"]
        assert await detokenize(client, tokens=tokens) == text
        assert await detokenize(client, tokens=[EOS], model="tiny") == "</s>"
        assert await detokenize(client, tokens=[]) == ""
        assert await detokenize(client, tokens=[VOCAB - 1]) == ""  # padding of the vocabulary


@pytest.mark.parametrize(
    ("body", "status", "param"),
    [
        ({"tokens": [VOCAB]}, 400, "tokens"),
        ({"tokens": [-1]}, 400, "tokens"),
        ({"tokens": [10**30]}, 400, "tokens"),
        ({"tokens": ["1"]}, 400, "tokens"),
        ({"tokens": "1"}, 400, "tokens"),
        ({"tokens": [1], "model": "other"}, 404, "model"),
        ({}, 400, "tokens"),
    ],
)
async def test_what_detokenize_refuses(body: dict[str, Any], status: int, param: str) -> None:
    async with serve() as client:
        found, error = await client.refused("/detokenize", body)
    assert (found, error["param"].partition("[")[0]) == (status, param)


@given(st.text(st.characters(exclude_categories=["Cs"]), max_size=60))
def test_any_text_survives_its_tokens(text: str) -> None:
    """The two routes use these two methods."""
    assert TOKENIZER.decode(TOKENIZER.encode(text), skip_special_tokens=False) == text


async def test_without_an_engine_both_are_unavailable() -> None:
    backend = FakeBackend()
    backend.welcome = None
    async with serve(backend) as client:
        for path, body in (("/tokenize", {"prompt": "x"}), ("/detokenize", {"tokens": []})):
            assert (await client.refused(path, body))[0] == 503


async def test_a_drain_refuses_them() -> None:
    async with serve() as client:
        client.gateway.lifecycle.drain()
        assert (await client.refused("/tokenize", {"prompt": "x"}))[0] == 503


async def test_an_answer_lists_a_bounded_number_of_tokens() -> None:
    async with serve(FakeBackend(max_model_len=100_000)) as client:
        body = msgspec.json.encode({"prompt": "é" * (MAX_TOKENS // 2 + 1)})
        status, error = await client.refused("/tokenize", io.BytesIO(body))
    assert (status, error["param"], str(MAX_TOKENS) in error["message"]) == (400, "prompt", True)


async def test_the_tokenizers_configuration_is_shown_if_wanted(tmp_path: Path) -> None:
    async with serve() as client:
        assert (await client.get("/tokenizer_info")).status == 404
    folder = write_model_folder(tmp_path / "model")
    other = tmp_path / "other.jinja"
    other.write_text("{{ messages[0].content }}")
    for settings, template in (({}, CHATML), ({"chat_template": str(other)}, other.read_text())):
        gateway = make_gateway(FakeBackend(), model=str(folder), enable_tokenizer_info_endpoint=True, **settings)
        gateway = msgspec.structs.replace(gateway, model=ServedModel.load(gateway.config))
        async with Client(TestServer(make_app(gateway))) as client, client.get("/tokenizer_info") as response:
            shown = await response.json()
        assert shown["chat_template"] == template
        assert shown["bos_token"] == "<s>"
        assert shown["tokenizer_class"] is None


async def test_the_load_is_the_number_of_requests_in_work() -> None:
    backend = FakeBackend()
    backend.pause_at = 1

    async def load(client: Client) -> int:
        async with client.get("/load") as response:
            answer = await response.json()
        check(answer, LoadResponse)
        return int(answer["server_load"])

    async with serve(backend) as client:
        assert await load(client) == 0
        fields = {"prompt": "hi", "stream": True}
        async with client.post("/v1/completions", json=fields), client.post("/v1/completions", json=fields):
            assert await load(client) == 2
            backend.go_on.set()
        await client.complete(prompt="hi")
        backend.refusal = Unavailable("gone")
        assert (await client.refused("/v1/completions", {"prompt": "hi"}))[0] == 503
        assert await load(client) == 0


def test_the_words_that_these_tests_count_are_single_tokens() -> None:
    assert "Ġtwo" in WORDS
    assert len(ids(" two" * 300)) == 300
    assert len(ids("é")) == 2
