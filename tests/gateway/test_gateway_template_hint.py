"""Tests the line in the log about a completion of a chat model that is empty, and that nothing else causes it."""

from collections.abc import Iterator, Sequence
from typing import Any

import pytest

from services.gateway import template_hint
from shared.log_limit import LogLimit
from tests.gateway.fakes import END_TURN, EOS, Client, FakeBackend, Script, says, serve
from tests.gateway.test_gateway_beam_search import BeamBackend, EndingModel

NOTHING = says("")
"""The end of the sequence is all that the model writes."""

now = 0.0


@pytest.fixture(autouse=True)
def limit() -> Iterator[None]:
    """Put the clock of these tests into the limit of lines, and forget those of other tests."""
    global now
    now = 0.0
    (real,) = template_hint.logger.filters
    fresh = LogLimit(max_lines=1, interval=template_hint.INTERVAL, clock=lambda: now)
    template_hint.logger.filters[:] = [fresh]
    yield
    template_hint.logger.filters[:] = [real]


def hints(caplog: pytest.LogCaptureFixture) -> list[Any]:
    return [record for record in caplog.records if record.name == template_hint.__name__]


async def ask(client: Client, **fields: Any) -> Any:
    return await client.complete(**{"prompt": "hello"} | fields)


@pytest.mark.parametrize("streams", [False, True])
async def test_an_empty_completion_of_a_chat_model_is_hinted_at(
    caplog: pytest.LogCaptureFixture, streams: bool
) -> None:
    async with serve(FakeBackend(NOTHING)) as client:
        if streams:
            (*_, answer) = await client.stream_completion(prompt="hello")
        else:
            answer = await ask(client)
    (record,) = hints(caplog)
    assert "/v1/chat/completions does" in record.message
    assert (record.levelname, record.request_id) == ("WARNING", answer["id"])


async def test_the_line_comes_once_a_minute_and_counts_the_others(caplog: pytest.LogCaptureFixture) -> None:
    global now
    async with serve(FakeBackend(NOTHING)) as client:
        await ask(client, prompt=["hello", "one"], n=2, temperature=1)
        await ask(client)
        assert len(hints(caplog)) == 1
        now += template_hint.INTERVAL
        await ask(client)
    assert hints(caplog)[1].message.endswith("(2 such lines before it were left out)")


@pytest.mark.parametrize(
    ("script", "fields"),
    [
        (says("one"), {}),
        (says("", "one"), {"n": 2, "temperature": 1}),
        (says([END_TURN]), {}),
        (NOTHING, {"echo": True}),
        (NOTHING, {"max_tokens": 0, "echo": True}),
        (NOTHING, {"stop_token_ids": [EOS]}),
        (NOTHING, {"ignore_eos": True, "max_tokens": 1}),
        (NOTHING, {"min_tokens": 1, "max_tokens": 2}),
        (NOTHING, {"logit_bias": {str(EOS): 100}}),
        (NOTHING, {"allowed_token_ids": [EOS]}),
        (NOTHING, {"structured_outputs": {"regex": "(one)?"}}),
        (says("one two"), {"stop": "one"}),
        (says([END_TURN]), {"stop": "<|im_end|>"}),
        (NOTHING, {"prompt": "<|im_start|>user\nhello<|im_end|>\n<|im_start|>assistant\n"}),
    ],
)
async def test_what_the_request_asked_for_is_not(
    caplog: pytest.LogCaptureFixture, script: Script, fields: dict[str, Any]
) -> None:
    async with serve(FakeBackend(script)) as client:
        await ask(client, **fields)
    assert hints(caplog) == []


class SilentModel(EndingModel):
    """A model that ends whatever it gets."""

    def logprobs(self, tokens: Sequence[int]) -> list[float]:
        values = super().logprobs(tokens)
        values[EOS] = -0.001
        return values


async def test_an_empty_beam_is_not(caplog: pytest.LogCaptureFixture) -> None:
    """The search weighed other outputs too."""
    async with serve(BeamBackend(SilentModel())) as client:
        answer = await ask(client, use_beam_search=True, n=1, max_tokens=4)
    assert (answer["choices"][0]["text"], answer["usage"]["completion_tokens"]) == ("", 1)
    assert hints(caplog) == []


async def test_neither_chats_nor_models_without_a_template_are(caplog: pytest.LogCaptureFixture) -> None:
    async with serve(FakeBackend(NOTHING)) as client:
        await client.chat()
        await client.respond()
    async with serve(FakeBackend(NOTHING), template=None) as client:
        await ask(client)
    assert hints(caplog) == []
