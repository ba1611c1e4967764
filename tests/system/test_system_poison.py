"""Tests who is blamed for the deaths of workers, if schedulers die too: a request that kills them, and nobody else."""

import asyncio
import signal
from array import array

import pytest

from services.gateway.engine_request import EngineRequest
from shared.protocol import FinishReason, Sampling, Suspicion
from tests.scripted_worker import CHAIN, Script, ScriptedFailure, expected_chain
from tests.system.processes import collect, complete, rest, serving, snapshot
from tests.waiting import until

POISON = 666
TOKENS = 200


def suspicion(request: EngineRequest) -> Suspicion:
    """Return what the gateway knows against the only sample of a request."""
    return request._samples[0].suspicion


@pytest.mark.parametrize("kind", ["raise", "exit"])
async def test_a_request_that_kills_workers_is_found_although_the_scheduler_dies(kind: str) -> None:
    """The scheduler is killed after the first worker that died of the request alone. The next such death is enough."""
    prompts = [[CHAIN, 10 + at] for at in range(4)]
    script = Script(start_delay=0.5, failures=[ScriptedFailure(POISON, kind)])  # so that no worker dies unseen
    async with serving(script) as (system, backend):
        with system.slowed():
            neighbours = [asyncio.create_task(complete(backend, prompt, TOKENS)) for prompt in prompts]
            await until(lambda: snapshot(backend).running == len(prompts))
            sampling = Sampling(max_tokens=9, seed=0, temperature=0.0)
            async with backend.submit(array("i", [CHAIN, POISON]), sampling) as request:
                await until(lambda: suspicion(request).deaths_alone == 1)
                lives = system.worker.lives
                system.scheduler.signal(signal.SIGKILL)
                (output,) = await collect(request)
        assert (output.finish, output.tokens) == (FinishReason.ERROR, [])
        assert output.detail == "the worker died 2 times while it ran this request alone"
        outputs = await asyncio.gather(*neighbours)
        assert [one.tokens for one in outputs] == [expected_chain(prompt, TOKENS) for prompt in prompts]
        result = await rest(backend)
        assert (result.finished_error, result.worker_losses) == (1, 1)
        assert system.worker.lives <= lives + 2, "one that may not have started yet, and the one after the last death"


@pytest.mark.parametrize("scheduler_dies", [False, True])
async def test_workers_that_are_killed_while_a_request_is_computed_again_blame_nobody(scheduler_dies: bool) -> None:
    """It is computed in 100 chunks, alone, and three workers are killed before it is where it once was."""
    prompt = [CHAIN, *(3 + at % 900 for at in range(1699))]
    flags = ("--max-num-seqs=16", "--max-num-batched-tokens=17", "--no-enable-prefix-caching")
    async with serving(None, *flags) as (system, backend):
        sampling = Sampling(max_tokens=TOKENS, seed=0, temperature=0.0)
        async with backend.submit(array("i", prompt), sampling) as request:
            running = asyncio.create_task(collect(request))
            await until(lambda: request.has_output)
            due = 0  # at this step
            with system.slowed():
                for deaths, steps in ((1, 60), (2, 10), (3, 0)):
                    await until(lambda due=due: backend.ready() and snapshot(backend).steps >= due)
                    system.worker.signal(signal.SIGKILL)
                    await until(lambda deaths=deaths: suspicion(request).deaths_alone == deaths)
                    due = steps + (0 if scheduler_dies else snapshot(backend).steps)
                    if scheduler_dies:
                        async with system.scheduler.absent():
                            await until(lambda: not backend.ready())
            (output,) = await running
        assert output.tokens == expected_chain(prompt, TOKENS)
        assert output.finish is FinishReason.LENGTH
