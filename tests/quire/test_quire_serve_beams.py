"""Tests beam search of `quire serve` with OpenAI's client: the beams are those of `LLM.beam_search`."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import openai
import pytest

from quire import LLM, BeamSearchOutput, BeamSearchParams
from tests.quire.quire_server import serving

PROMPT = "What is the capital of France?"
BEAMS: dict[str, Any] = {"use_beam_search": True}


@pytest.fixture(scope="module")
def client(folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[openai.OpenAI]:
    with (
        serving(folder, tmp_path_factory.mktemp("serve"), "--dtype=float32") as server,
        openai.OpenAI(base_url=f"{server.url}/v1", api_key="any", max_retries=0) as client,
    ):
        yield client


@pytest.fixture(scope="module")
def llm(folder: Path) -> Iterator[LLM]:
    with LLM(folder, dtype="float32", kv_cache_memory=0.05, num_threads=1) as llm:
        yield llm


def new_texts(llm: LLM, output: BeamSearchOutput) -> list[str]:
    tokenizer = llm.tokenizer
    start = len(tokenizer.encode(PROMPT))
    return [tokenizer.decode(sequence.tokens[start:], skip_special_tokens=True) for sequence in output.sequences]


def test_a_completion(client: openai.OpenAI, llm: LLM) -> None:
    answer = client.completions.create(
        model="tiny", prompt=PROMPT, n=4, max_tokens=12, logprobs=0, extra_body=BEAMS | {"length_penalty": 0.5}
    )
    (output,) = llm.beam_search(PROMPT, BeamSearchParams(4, 12, length_penalty=0.5))
    assert [choice.text for choice in answer.choices] == new_texts(llm, output)
    for choice, sequence in zip(answer.choices, output.sequences, strict=True):
        assert choice.logprobs is not None
        values = choice.logprobs.token_logprobs
        assert values is not None
        assert sum(values) == pytest.approx(sequence.cum_logprob)


def test_vllms_batch_of_completions(client: openai.OpenAI) -> None:
    """vLLM's test_batch_completions asks this, whole and as a stream."""
    fields: Any = {"model": "tiny", "prompt": ["Hello, my name is"] * 2, "n": 2, "max_tokens": 5, "temperature": 0.0}
    batch = client.completions.create(**fields, extra_body=BEAMS)
    texts = [choice.text for choice in batch.choices]
    assert len(texts) == 4
    assert texts[0] != texts[1]
    assert texts[:2] == texts[2:]
    streamed = [""] * 4
    for chunk in client.completions.create(**fields, stream=True, extra_body=BEAMS):
        for choice in chunk.choices:
            streamed[choice.index] += choice.text
    assert streamed == texts


def test_a_chat_whole_and_streamed(client: openai.OpenAI) -> None:
    fields: Any = {"model": "tiny", "messages": [{"role": "user", "content": "Hello!"}], "n": 3, "max_tokens": 8}
    answer = client.chat.completions.create(**fields, extra_body=BEAMS)
    contents = [choice.message.content for choice in answer.choices]
    assert len(set(contents)) == 3
    streamed, reasons = [""] * 3, {}
    for chunk in client.chat.completions.create(**fields, stream=True, extra_body=BEAMS):
        for choice in chunk.choices:
            streamed[choice.index] += choice.delta.content or ""
            if choice.finish_reason is not None:
                reasons[choice.index] = choice.finish_reason
    assert streamed == contents
    assert reasons == {choice.index: choice.finish_reason for choice in answer.choices}


def test_what_cannot_be_done_is_an_error_of_the_client(client: openai.OpenAI) -> None:
    with pytest.raises(openai.BadRequestError) as error:
        client.completions.create(model="tiny", prompt=PROMPT, top_p=0.5, stream=True, extra_body=BEAMS)
    assert error.value.param == "top_p"
    assert "top_p is not supported in a beam search, got 0.5" in error.value.message
