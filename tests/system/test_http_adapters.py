"""Adapters (LoRA) over HTTP and real processes: deaths, loads and removals while streams run.

The scripted model's tokens depend on the adapter in the slot of their sequence and on all tokens before them.
"""

import asyncio
import re
import signal
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack
from pathlib import Path

import pytest
import pytest_asyncio

from tests.gateway.fakes import events, texts
from tests.scripted_worker import CHAIN
from tests.system.http_client import Exchange, Listening, ask, chained, client, complete, figures, streaming, talk
from tests.system.processes import Server, engine, gateways
from tests.system.processes import server as serving
from tests.waiting import until

pytestmark = pytest.mark.asyncio(loop_scope="module")

TOKENS = 200
NAMES = ("a1", "a2", "a3", "a4")
SCRIPT = talk(max_loras=4, max_cpu_loras=6)
LOAD, UNLOAD = "/v1/load_lora_adapter", "/v1/unload_lora_adapter"
UPDATES = "--enable-lora-runtime-updates"


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a folder with adapters 1 to 9, which are these numbers."""
    folder = tmp_path_factory.mktemp("adapters")
    for number in range(1, 10):
        (folder / f"a{number}").mkdir()
        (folder / f"a{number}" / "number").write_text(str(number))
    return folder


def modules(folder: Path) -> list[str]:
    return [f"--lora-modules={name}={folder / name}" for name in NAMES]


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def server(folder: Path) -> AsyncIterator[Server]:
    async with serving(SCRIPT, "--max-num-seqs=32", *modules(folder), front=[UPDATES]) as system:
        yield system


async def models(at: Listening) -> list[str]:
    return [card["id"] for card in (await ask(at, "/v1/models")).json["data"]]


async def load(at: Listening, name: str, path: Path, **fields: object) -> int:
    return (await ask(at, LOAD, lora_name=name, lora_path=str(path), **fields)).status


async def text(at: Listening, prompt: list[int], model: str, tokens: int = 8) -> str:
    answer: str = (await complete(at, prompt, tokens, model=model)).json["choices"][0]["text"]
    return answer


async def streams_of_all(stack: AsyncExitStack, at: Listening, names: list[str], count: int) -> list[asyncio.Task[str]]:
    """Begin streams that take turns with the adapters; return the tasks that read each to its end."""

    async def read(stream: Exchange) -> str:
        return texts(events(await stream.rest()))[0]

    opening = (streaming(at, prompts(index), TOKENS, model=names[index % len(names)]) for index in range(count))
    streams = await asyncio.gather(*map(stack.enter_async_context, opening))
    return [asyncio.create_task(read(stream)) for stream in streams]


def prompts(index: int) -> list[int]:
    return [CHAIN, 10 + index]


async def test_a_client_chooses_adapters(server: Server) -> None:
    official = client(server)
    assert [model.id async for model in official.models.list()] == ["tiny", *NAMES]
    for number, name in enumerate(("tiny", *NAMES)):
        answer = await official.completions.create(model=name, prompt=[CHAIN, 5], max_tokens=8)
        assert (answer.model, answer.choices[0].text) == (name, chained([CHAIN, 5], 8, number))
    await official.close()


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSTOP])
async def test_streams_of_four_adapters_outlive_their_worker(server: Server, number: signal.Signals) -> None:
    """Every stream goes on bit by bit."""
    async with AsyncExitStack() as stack:
        with server.engine.slowed():
            tasks = await streams_of_all(stack, server, list(NAMES), 16)
            assert not any(task.done() for task in tasks)
            server.engine.worker.signal(number)
        answers = await asyncio.gather(*tasks)
    assert answers == [chained(prompts(index), TOKENS, 1 + index % 4) for index in range(16)]


async def test_more_adapters_than_slots_take_turns(server: Server, folder: Path) -> None:
    """There are nine, four slots and memory for six."""
    for number in range(5, 10):
        assert await load(server, f"a{number}", folder / f"a{number}") == 200
    names = [f"a{number}" for number in range(1, 10)]
    async with AsyncExitStack() as stack:
        answers = await asyncio.gather(*await streams_of_all(stack, server, names, 27))
    assert answers == [chained(prompts(index), TOKENS, 1 + index % 9) for index in range(27)]
    for number in range(5, 10):
        assert (await ask(server, UNLOAD, lora_name=f"a{number}")).status == 200
    assert await models(server) == ["tiny", *NAMES]


async def test_adapters_come_and_go_while_streams_run(server: Server, folder: Path) -> None:
    async with AsyncExitStack() as stack:
        with server.engine.slowed():
            tasks = await streams_of_all(stack, server, list(NAMES), 16)
            refused = await ask(server, LOAD, lora_name="bad", lora_path=str(folder / "missing"))
            assert refused.status == 400
            assert "is no adapter: No such file" in refused.error["message"]
            assert refused.error["param"] == "lora_path"
            assert await load(server, "new", folder / "a7") == 200
            assert await load(server, "new", folder / "a8") == 400, "it is there already"
            assert not any(task.done() for task in tasks), "none of these had to wait"
        assert await text(server, [CHAIN, 6], "new") == chained([CHAIN, 6], 8, 7)
        assert await load(server, "new", folder / "a8", load_inplace=True) == 200
        assert await text(server, [CHAIN, 6], "new") == chained([CHAIN, 6], 8, 8)
        assert (await ask(server, UNLOAD, lora_name="new")).status == 200
        assert (await complete(server, [CHAIN, 6], 8, model="new")).status == 404
        answers = await asyncio.gather(*tasks)
    assert answers == [chained(prompts(index), TOKENS, 1 + index % 4) for index in range(16)]


async def test_a_stream_goes_on_with_an_adapter_that_is_replaced_or_removed(server: Server, folder: Path) -> None:
    assert await load(server, "x", folder / "a5") == 200
    async with AsyncExitStack() as stack:
        with server.engine.slowed():
            old = await stack.enter_async_context(streaming(server, [CHAIN, 7], TOKENS, model="x"))
            begun = await old.event()
            assert await load(server, "x", folder / "a6", load_inplace=True) == 200
            new = await stack.enter_async_context(streaming(server, [CHAIN, 7], TOKENS, model="x"))
            assert (await ask(server, UNLOAD, lora_name="x")).status == 200
            server.engine.worker.signal(signal.SIGKILL)
        answers = [texts(events(begun + "\n\n" + await old.rest()))[0], texts(events(await new.rest()))[0]]
    assert answers == [chained([CHAIN, 7], TOKENS, number) for number in (5, 6)]


async def test_figures_name_the_adapters(server: Server) -> None:

    async def is_named() -> bool:
        text = (await ask(server, "/metrics")).text
        match = re.search(r"vllm:lora_requests_info\{(.*?)\}", text)
        return match is not None and 'running_lora_adapters="a2"' in match[1] and 'max_lora="4"' in match[1]

    async with AsyncExitStack() as stack:
        with server.engine.slowed():
            stream = await stack.enter_async_context(streaming(server, [CHAIN, 8], TOKENS, model="a2"))
            await until(is_named)
        await stream.rest()


async def test_streams_and_adapters_outlive_their_scheduler(server: Server, folder: Path) -> None:
    """One that was loaded at run time is loaded again by the gateway."""
    assert await load(server, "hot", folder / "a9") == 200
    names = [*NAMES, "hot"]
    async with AsyncExitStack() as stack:
        with server.engine.slowed():
            tasks = await streams_of_all(stack, server, names, 10)
            assert not any(task.done() for task in tasks)
            server.engine.scheduler.signal(signal.SIGKILL)
        answers = await asyncio.gather(*tasks)
    numbers = [1, 2, 3, 4, 9]
    assert answers == [chained(prompts(index), TOKENS, numbers[index % 5]) for index in range(10)]
    assert await models(server) == ["tiny", *NAMES, "hot"]
    assert (await figures(server))["quire:inexact_resumes_total"] == 0


async def test_every_gateway_and_engine_knows_of_a_change(folder: Path) -> None:
    async with (
        engine(SCRIPT) as first,
        engine(SCRIPT) as second,
        gateways(2, [first, second], UPDATES) as fronts,
    ):
        assert await load(fronts[0], "x", folder / "a3") == 200

        async def knows() -> bool:
            return await models(fronts[1]) == ["tiny", "x"]

        await until(knows)
        for index in range(6):
            assert await text(fronts[index % 2], [CHAIN, index], "x") == chained([CHAIN, index], 8, 3)
        second.worker.signal(signal.SIGSTOP)
        second.scheduler.restart = False
        second.scheduler.signal(signal.SIGKILL)
        await second.scheduler.ended()
        unreachable = await ask(fronts[0], LOAD, lora_name="y", lora_path=str(folder / "a4"))
        assert unreachable.status == 503
        assert "y" not in await models(fronts[0])


async def test_an_adapter_that_cannot_be_loaded_ends_the_start(folder: Path) -> None:
    missing = folder / "missing"
    async with engine(SCRIPT, f"--lora-modules=a={missing}") as behind:
        behind.scheduler.restart = False
        assert await behind.scheduler.ended() == 2
        line = f"scheduler: --lora-modules a={missing}: {missing} is no adapter: No such file or directory"
        assert line in behind.scheduler.log.splitlines()
