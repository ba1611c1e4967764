"""Tests the logs of real processes: one id finds what happened to a request in all of them."""

import asyncio
import json
import re
import signal
from typing import Any

import aiohttp

from tests.scripted_worker import CHAIN, ScriptedFailure
from tests.system.http_client import talk
from tests.system.processes import Child, Gateway, engine, gateway
from tests.waiting import until

POISON = 20
AS_JSON = "--log-format=json"


def records(child: Child) -> list[dict[str, Any]]:
    """Return the records in a child's log, each line of which must be one. The last one may not be written yet."""
    return [json.loads(line) for line in child.log.rpartition("\n")[0].splitlines()]


def of_request(child: Child, id: str) -> list[str]:
    """Return the messages about a request, with 0 in place of seconds."""
    about = [one for one in records(child) if one.get("request_id") == id or id in one.get("request_ids", ())]
    return [re.sub(r"\d+\.\d+ s\b", "0 s", one["message"]) for one in about]


async def complete(at: Gateway, prompt: list[int], count: int, id: str) -> int:
    """Complete a prompt, as the request `id`. Return the status."""
    body = {"prompt": prompt, "max_tokens": count}
    url = f"http://127.0.0.1:{at.port}/v1/completions"
    async with aiohttp.ClientSession() as client, client.post(url, json=body, headers={"X-Request-Id": id}) as answer:
        await answer.read()
        return answer.status


async def test_one_id_is_in_the_logs_of_all_services() -> None:
    """GTW-06: of one that kills workers, beside one that lives on, and of one that outlives its scheduler."""
    script = talk(failures=[ScriptedFailure(POISON, "raise")])
    async with engine(script, AS_JSON, "--log-level=debug", worker=False) as behind:
        behind.worker.argv = [*behind.worker.argv, AS_JSON]
        await behind.worker.start()
        async with gateway(behind, AS_JSON, "--enable-log-requests") as front:
            with behind.slowed():
                good = asyncio.create_task(complete(front, [CHAIN, 10], 200, "good"))
                await until(lambda: "cmpl-good" in front.log)
                assert await complete(front, [CHAIN, POISON], 9, "bad") == 500
                assert not good.done()
            assert await good == 200
            check_poison(front, behind.scheduler, behind.worker)
            with behind.slowed():
                moved = asyncio.create_task(complete(front, [CHAIN, 11], 200, "moved"))
                runs = "sample 0 runs, after 0 s in the queue and 0 preemptions"
                await until(lambda: of_request(behind.scheduler, "cmpl-moved") == [runs])
                behind.scheduler.signal(signal.SIGKILL)
                await until(lambda: behind.scheduler.lives == 2)
            assert await moved == 200
            assert of_request(front, "cmpl-moved")[1:3] == [
                f"engine at {behind.address} was lost: its connection ended (1 requests)",
                "a request goes on at engine 0 (losses without output between them: 1)",
            ]


def check_poison(front: Gateway, scheduler: Child, worker: Child) -> None:
    said = "the worker died 2 times while it ran this request alone"
    assert of_request(front, "cmpl-bad") == [
        "arrived: 2 tokens of prompt, max_tokens=9, n=1",
        f"a request failed: {said}",
        "ended: error, after 2 tokens of prompt and 0 of output, in 0 s",
        "POST /v1/completions: 500 in 0 s",
    ]
    *losses, end = of_request(scheduler, "cmpl-bad")
    assert losses[0] == "the worker was lost with 2 suspects"
    assert losses[-1] == "the worker was lost with 1 suspects"
    assert end == f"a request is ended: {said}"
    failures = [one for one in records(worker) if one["level"] == "error"]
    assert all("RuntimeError: scripted failure" in one["exception"] for one in failures)
    assert len(failures) == len(of_request(worker, "cmpl-bad")) == worker.lives - 1
    assert of_request(worker, "cmpl-good") == [failures[0]["message"]], "it was in the first step that failed"
