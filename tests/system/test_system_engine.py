"""Tests the gateway's backend with a scheduler and a worker as real processes, when nothing fails."""

import asyncio
from array import array

import pytest

from services.gateway.backend import Backend
from shared.errors import InvalidRequest, Overloaded, Unavailable
from shared.protocol import FinishReason, Sampling
from tests.scripted_worker import CHAIN, Reply, Script, expected_chain
from tests.system.processes import collect, complete, engine, rest, serving, snapshot
from tests.waiting import until

SLOW = Script(delay=0.02)
ENDLESS = 1500  # tokens


def greedy(count: int, **fields: object) -> Sampling:
    return Sampling(max_tokens=count, seed=0, temperature=0.0, **fields)  # type: ignore[arg-type]


async def test_tokens_come_in_order_and_nothing_is_held_afterwards() -> None:
    async with serving() as (_, backend):
        output = await complete(backend, [CHAIN, 7, 8], 40)
        assert output.tokens == expected_chain([CHAIN, 7, 8], 40)
        assert output.finish is FinishReason.LENGTH
        assert (await rest(backend)).generation_tokens == 40


async def test_a_stop_token_ends_a_reply() -> None:
    script = Script(replies=[Reply([11, 12], [31, 32, 33])], eos=4)
    async with serving(script) as (_, backend):
        output = await complete(backend, [10, 11, 12, 13], 40, stop=4)
        assert (output.tokens, output.finish) == ([31, 32, 33, 4], FinishReason.STOP)


async def test_many_requests_at_once_each_get_their_own() -> None:
    async with serving(None, "--max-num-seqs=8", "--num-gpu-blocks-override=60", "--max-model-len=200") as (_, backend):
        prompts = [[CHAIN, 5, at] * (1 + at % 9) for at in range(40)]
        outputs = await asyncio.gather(*(complete(backend, prompt, 30) for prompt in prompts))
        assert [output.tokens for output in outputs] == [expected_chain(prompt, 30) for prompt in prompts]
        assert (await rest(backend)).finished_length == 40


async def test_samples_share_a_prompt() -> None:
    async with serving() as (_, backend):
        prompt = [CHAIN, *range(10, 50)]
        async with backend.submit(array("i", prompt), greedy(20), n=3) as attempt:
            outputs = await collect(attempt, 3)
        assert [output.tokens for output in outputs] == [expected_chain(prompt, 20, sample) for sample in range(3)]
        await rest(backend)


async def test_logprobs_of_prompt_and_output_arrive() -> None:
    async with serving() as (_, backend):
        sampling = greedy(3, logprobs=2, prompt_logprobs=1)
        async with backend.submit(array("i", [5, 6, 7, 8]), sampling) as attempt:
            rows = []
            while not rows or rows[-1].finish_reason is None:
                rows += await attempt.rows()
        assert [one.top_ids for row in rows for one in row.prompt_logprobs or []] == [[6], [7], [8]]
        assert [one.top_ids for row in rows for one in row.logprobs or []] == [[9, 10], [10, 11], [11, 12]]


async def test_a_context_that_does_not_fit_is_reduced_and_said_so() -> None:
    async with serving(Script(blocks=10), "--max-model-len=1000") as (system, backend):
        assert backend.welcome is not None
        assert backend.welcome.max_model_len == 160
        assert "max_model_len is reduced from 1000 to 160" in system.scheduler.log
        assert len((await complete(backend, [5] * 100, 60)).tokens) == 60
        with pytest.raises(InvalidRequest, match="more than the 160"):
            await complete(backend, [5] * 100, 61)


async def test_no_context_at_all_is_one_clear_line() -> None:
    async with engine(Script(blocks=0), worker=False) as system:
        system.scheduler.restart = False
        await system.worker.start()
        assert await system.scheduler.ended() == 2
        assert system.scheduler.log.splitlines()[-1].startswith("scheduler: the worker has 0 bytes for KV")
        assert "Traceback" not in system.scheduler.log


async def test_tokens_that_the_model_has_not_are_refused() -> None:
    async with serving() as (system, backend):
        for prompt, sampling in (
            ([5, 1000], greedy(3)),
            ([5, -1], greedy(3)),
            ([5], greedy(3, stop_token_ids=[1000])),
            ([5], greedy(3, logit_bias=[(1 << 30, 1.0)])),
        ):
            with pytest.raises(InvalidRequest, match="token"):
                async with backend.submit(array("i", prompt), sampling) as attempt:
                    await attempt.rows()
        assert len((await complete(backend, [999], 2)).tokens) == 2
        assert system.worker.lives == 1


async def test_before_any_worker_there_is_nothing_to_submit_to() -> None:
    async with engine(worker=False) as system, Backend([system.address]) as backend:
        with pytest.raises(Unavailable):
            await complete(backend, [5], 1)
        await system.worker.start()  # a gateway that said Hello long ago is answered now
        await until(backend.ready)
        assert len((await complete(backend, [5], 1)).tokens) == 1


async def test_a_full_queue_refuses_at_once_with_a_hint_when_to_come_back() -> None:
    async with serving(SLOW, "--max-num-seqs=1", "--max-num-queued-reqs=2") as (_, backend):
        running = [asyncio.create_task(complete(backend, [5], 30)) for _ in range(6)]
        done, _ = await asyncio.wait(running, return_when=asyncio.FIRST_EXCEPTION)
        with pytest.raises(Overloaded) as caught:
            done.pop().result()
        assert caught.value.retry_after > 0
        results = await asyncio.gather(*running, return_exceptions=True)
        served = [one for one in results if not isinstance(one, Overloaded)]
        assert 2 <= len(served) <= 3
        result = await rest(backend)
        assert (result.accepted, result.refused) == (len(served), 6 - len(served))


async def test_leaving_a_running_request_frees_its_blocks_soon() -> None:
    async with serving(SLOW) as (_, backend):
        async with backend.submit(array("i", [5] * 50), greedy(ENDLESS)) as attempt:
            rows = await attempt.rows()
            while len(rows) < 5:
                rows += await attempt.rows()
        result = await rest(backend)
        assert result.finished_abort == 1
        assert result.steps < ENDLESS / 10


async def test_leaving_requests_in_the_queue_spares_them_the_prefill() -> None:
    async with serving(SLOW, "--max-num-seqs=1") as (_, backend):
        async with backend.submit(array("i", [5]), greedy(ENDLESS)) as first:
            await first.rows()
            queued = [asyncio.create_task(complete(backend, [6] * 100, 5)) for _ in range(10)]
            await until(lambda: snapshot(backend).waiting == 10)
            for task in queued:
                task.cancel()
            await until(lambda: snapshot(backend).waiting == 0)
        assert len((await complete(backend, [7], 3)).tokens) == 3
        result = await rest(backend)
        assert result.prompt_tokens == 2


async def test_aborts_are_idempotent_and_late_results_have_no_owner() -> None:
    async with serving(Script(delay=0.3)) as (_, backend):
        async with backend.submit(array("i", [5]), greedy(ENDLESS), n=2) as attempt:
            await attempt.rows()
            attempt.abort(0)  # while a result of it is on its way
            attempt.abort(0)
            rows = await attempt.rows()
            assert {row.sample for row in rows} == {1}
        async with backend.submit(array("i", [5]), greedy(1)) as attempt:
            await collect(attempt)
            attempt.abort(0)  # it has just finished
        assert len((await complete(backend, [6], 2)).tokens) == 2
        result = await rest(backend)
        assert (result.finished_abort, result.worker_losses) == (2, 0)


async def test_two_gateways_on_one_engine_do_not_meet() -> None:
    async with serving() as (system, one), Backend([system.address]) as other:
        await until(other.ready)
        prompts = [[CHAIN, at] for at in range(20)]
        outputs = await asyncio.gather(*(complete(side, prompt, 25) for prompt in prompts for side in (one, other)))
        expected = [expected_chain(prompt, 25) for prompt in prompts for _ in (one, other)]
        assert [output.tokens for output in outputs] == expected
        await rest(one)


async def test_one_gateway_spreads_over_two_engines() -> None:
    async with (
        engine(SLOW, "--engine=a") as first,
        engine(SLOW, "--engine=b") as second,
        Backend([first.address, second.address]) as backend,
    ):
        await until(lambda: [one.ready for one in backend.statuses().values()] == [True, True])
        await asyncio.gather(*(complete(backend, [CHAIN, at], 10) for at in range(12)))
        await until(lambda: sum(one.snapshot.finished_length for one in backend.statuses().values()) == 12)
        counts = {name: status.snapshot.finished_length for name, status in backend.statuses().items()}
        assert counts == {"a": 6, "b": 6}
