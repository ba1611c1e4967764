"""Whole servers with more to do than they can: bursts, full queues, a gateway that stands still, long outputs."""

import asyncio
import signal
from collections import Counter
from functools import partial

import openai
import pytest

from tests.gateway.fakes import ends, events, texts
from tests.scripted import CHAIN
from tests.system.asking import MODEL, SEQUENCES, chained, client, complete, ended, figures, says, settled, talk
from tests.system.running import Server, until
from tests.system.running import server as serving

BURST = 500


def mixed(at: int) -> tuple[list[int], int]:
    """Prompt and length of the request of this number."""
    return [CHAIN, 4 + at % 250, 4 + at // 250, *[9] * (at % 40)], 1 + at % 12


async def burst(server: Server) -> list[int]:
    """All at once; their statuses. Those that were served got what was theirs."""
    requests = [mixed(at) for at in range(BURST)]
    answers = await asyncio.gather(*(complete(server, prompt, length) for prompt, length in requests))
    for answer, (prompt, length) in zip(answers, requests, strict=True):
        if answer.status == 200:
            assert answer.json["choices"][0]["text"] == chained(prompt, length)
        else:
            assert answer.error["type"] == "RateLimitError"
            assert int(answer.headers["retry-after"]) >= 1
    return [answer.status for answer in answers]


async def test_sch_12_a_burst_at_a_cold_server_is_served() -> None:
    async with serving(talk(), "--max-num-seqs=16") as server:
        assert Counter(await burst(server)) == {200: BURST}
        grown = await settled(server)
        assert ended(grown, SEQUENCES) == {"length": BURST}
        assert grown["vllm:num_preemptions_total"] == 0


async def test_sch_12_beyond_a_limit_the_burst_is_turned_away_at_once() -> None:
    async with serving(talk(delay=0.01), "--max-num-seqs=16", "--max-num-queued-reqs=50") as server:
        found = Counter(await burst(server))
        assert set(found) == {200, 429}
        assert found[200] >= 50
        grown = await settled(server)
        assert (grown["quire:requests_accepted_total"], grown["quire:requests_refused_total"]) == (
            found[200],
            found[429],
        )
        assert grown["quire:http_responses_total:429"] == found[429]


async def shows_one(server: Server, figure: str) -> bool:
    return (await figures(server))[f"vllm:num_requests_{figure}"] == 1


async def test_sch_12_the_official_client_sees_a_rate_limit() -> None:
    flags = ("--max-num-seqs=1", "--max-num-queued-reqs=1")
    async with serving(talk(delay=0.05), *flags) as server, client(server) as official:
        chat = official.chat.completions.create
        fill = []
        for figure in ("running", "waiting"):  # one after the other, since two at once may find the queue full
            fill.append(asyncio.create_task(chat(model=MODEL, messages=says("view"), max_tokens=20)))
            await until(partial(shows_one, server, figure))
        for stream in (False, True):
            with pytest.raises(openai.RateLimitError) as caught:
                await chat(model=MODEL, messages=says("port"), stream=stream)
            assert int(caught.value.response.headers["Retry-After"]) >= 1
        patient = official.with_options(max_retries=10).chat.completions
        answer = await patient.create(model=MODEL, messages=says("port"))
        assert answer.choices[0].message.content == "one two three"
        await asyncio.gather(*fill)


async def test_prc_06_a_gateway_that_stands_still_loses_nothing() -> None:
    """The steps go on meanwhile; what it cannot take waits for it."""
    async with serving(talk(), "--max-num-seqs=64", "--max-num-queued-reqs=5000") as server:
        prompts = [[CHAIN, 4 + at % 250, 4 + at // 250] for at in range(300)]
        fields = {"stream": True, "stream_options": {"include_usage": True}}
        running = [asyncio.create_task(complete(server, prompt, 40, **fields)) for prompt in prompts]

        async def begun() -> bool:
            return (await figures(server))["vllm:generation_tokens_total"] > 0

        await until(begun)
        server.gateway.signal(signal.SIGSTOP)
        await asyncio.sleep(2.0)  # the point
        server.gateway.signal(signal.SIGCONT)
        for prompt, answer in zip(prompts, await asyncio.gather(*running), strict=True):
            chunks = events(answer.text)
            assert texts(chunks) == {0: chained(prompt, 40)}
            assert ends(chunks) == {0: ["length"]}
            assert chunks[-1]["usage"]["completion_tokens"] == 40
        grown = await settled(server)
        assert grown["vllm:generation_tokens_total"] == 300 * 40
        assert (server.gateway.lives, server.engine.scheduler.lives) == (1, 1)


async def test_lim_13_without_a_limit_outputs_fill_the_context_exactly() -> None:
    async with serving(talk(), "--max-model-len=128") as server, client(server) as official:
        answers = await asyncio.gather(
            *(
                official.chat.completions.create(model=MODEL, messages=says(content), extra_body={"ignore_eos": True})
                for content in ("hello", "view", "port", "one two")
            )
        )
        for answer in answers:
            assert answer.choices[0].finish_reason == "length"
            assert answer.usage is not None
            assert answer.usage.total_tokens == 128
        grown = await settled(server)
        assert ended(grown, SEQUENCES) == {"length": 4}
        assert grown["vllm:prompt_tokens_total"] + grown["vllm:generation_tokens_total"] == 4 * 128
