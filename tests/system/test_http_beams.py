"""Tests beam search on whole servers: its answer outlives the processes that compute it, and nothing of it stays."""

import asyncio
import signal
from collections.abc import AsyncIterator, Sequence
from typing import Any

import pytest
import pytest_asyncio

from shared.beam_params import BeamSettings
from shared.beam_search import BeamSearch
from shared.protocol import Sampling, TokenLogprobs
from tests.gateway.fakes import events, texts
from tests.scripted_worker import CHAIN, chain
from tests.system.http_client import (
    SAMPLES,
    TALK,
    TOKENIZER,
    Answer,
    change,
    client,
    complete,
    ended,
    figures,
    idle,
    streaming,
    talk,
)
from tests.system.processes import Server, engine, gateways
from tests.system.processes import server as serving
from tests.waiting import until

pytestmark = pytest.mark.asyncio(loop_scope="module")

WIDTH, TOKENS = 4, 40
SEARCH = {"use_beam_search": True, "n": WIDTH, "temperature": 0}


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def server() -> AsyncIterator[Server]:
    async with serving(talk(), "--max-num-seqs=8", "--worker-timeout=1") as system:
        yield system


def scripted(tokens: Sequence[int], count: int) -> TokenLogprobs:
    """Return the distribution that the scripted worker reports after these tokens."""
    token = chain(list(tokens), 0, TALK.vocab_size)
    likeliest = [(token + away) % TALK.vocab_size for away in range(count)]
    return TokenLogprobs(-0.25, 1, likeliest, [-0.25 - away for away in range(count)])


def expected(prompt: Sequence[int], width: int = WIDTH, tokens: int = TOKENS) -> list[str]:
    settings = BeamSettings(width)
    sampling = Sampling(max_tokens=tokens, seed=0, stop_token_ids=list(TOKENIZER.eos_token_ids))
    search = BeamSearch(settings, sampling)
    while search.running:
        count = settings.num_candidates(sampling)
        search.advance([scripted([*prompt, *beam.tokens], count) for beam in search.running])
    beams = [one.beam.tokens for one in search.finished]
    return [TOKENIZER.decode(beam[:-1] if beam[-1] in TOKENIZER.eos_token_ids else beam) for beam in beams]


def answered(answer: Answer) -> list[str]:
    assert answer.status == 200, answer.text
    return [choice["text"] for choice in answer.json["choices"]]


async def generated(server: Any, since: Any, count: int) -> bool:
    return change(since, await figures(server))["vllm:generation_tokens_total"] >= count


async def test_an_answer_whole_and_streamed(server: Server) -> None:
    """To OpenAI's client, which sends the fields that it does not know in `extra_body`."""
    since, prompt = await figures(server), [CHAIN, 11]
    async with client(server) as official:
        whole = await official.completions.create(
            model="tiny", prompt=prompt, n=3, max_tokens=12, extra_body={"use_beam_search": True}
        )
    assert [choice.text for choice in whole.choices] == expected(prompt, 3, 12)
    async with streaming(server, prompt, 12, use_beam_search=True, n=3) as stream:
        chunks = events(await stream.rest())
    assert texts(chunks) == dict(enumerate(expected(prompt, 3, 12)))
    await until(lambda: _idle(server))
    grown = change(since, await figures(server))
    assert sum(ended(grown, SAMPLES).values()) == 2 * 3
    assert grown["vllm:prompt_tokens_total"] == 2 * 2


async def _idle(server: Server) -> bool:
    return idle(await figures(server))


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSTOP])
@pytest.mark.parametrize("part", ["worker", "scheduler"])
async def test_a_search_outlives_its_engine(server: Server, part: str, number: signal.Signals) -> None:
    since, prompt = await figures(server), [CHAIN, 20]
    process = getattr(server.engine, part)
    lives = process.lives
    num_lost = server.gateway.log.count("was lost")
    with server.engine.slowed(0.1):
        answer = asyncio.create_task(complete(server, prompt, TOKENS, **SEARCH))
        await until(lambda: generated(server, since, 30))
        assert not answer.done()
        process.signal(number)
        if part == "scheduler" and number is signal.SIGSTOP:
            await until(lambda: server.gateway.log.count("was lost") > num_lost)
            process.signal(signal.SIGCONT)
    assert answered(await answer) == expected(prompt)
    assert process.lives > lives or number is signal.SIGSTOP
    await until(lambda: _idle(server))


async def test_a_search_goes_on_at_another_engine() -> None:
    """The lost scheduler does not come back. All branches were at one engine."""
    prompt = [CHAIN, 30]
    async with (
        engine(talk(), "--engine=a") as first,
        engine(talk(), "--engine=b") as second,
        gateways(1, [first, second]) as (front,),
    ):
        since = await figures(front)
        with first.slowed(0.1):
            answer = asyncio.create_task(complete(front, prompt, TOKENS, **SEARCH))
            await until(lambda: generated(front, since, 30))
            first.scheduler.restart = False
            first.scheduler.signal(signal.SIGKILL)
        assert answered(await answer) == expected(prompt)
        resumed = change(since, await figures(front))["quire:resumed_requests_total"]
        assert 1 <= resumed <= WIDTH


@pytest.mark.parametrize("how", ["leave", "reset"])
async def test_a_client_that_leaves_ends_its_search(server: Server, how: str) -> None:
    """ABT-01."""
    since = await figures(server)
    async with streaming(server, [CHAIN, 40], 1000, **SEARCH) as stream:
        with server.engine.slowed():
            await until(lambda: generated(server, since, 20))
            await getattr(stream, how)()
            await until(lambda: _idle(server))
    grown = change(since, await figures(server))
    assert ended(grown, SAMPLES) == {"abort": WIDTH}
    assert grown["vllm:generation_tokens_total"] < 1000


async def test_searches_and_streams_run_beside_each_other(server: Server) -> None:
    prompts = [[CHAIN, 50 + at] for at in range(6)]
    answers = await asyncio.gather(*(complete(server, prompt, 15, **SEARCH) for prompt in prompts))
    assert [answered(answer) for answer in answers] == [expected(prompt, WIDTH, 15) for prompt in prompts]
    await until(lambda: _idle(server))
