"""Runs one cell on a deployment: requests, a fault at a sure moment, and the comparison with an undisturbed run.

The undisturbed run is made by another deployment, in which nothing fails and which does not share a cache with this
one. All must be equal: tokens, log-probabilities, text, the reason of each end and the usage.
"""

import asyncio
import random
import re
import shutil
import sys
import time
from collections.abc import Callable, Sequence
from contextlib import AsyncExitStack, suppress
from pathlib import Path

from msgspec import Struct
from msgspec.structs import replace

from tests.chaos.cells import Cell, Fault, Layout, Moment, Strike, Target, When
from tests.chaos.client import Client, Outcome, api_at, ask, differences, gateway_is_lost, gateway_refuses
from tests.chaos.deployment import PATIENCE, Deployment, GatedEngine, deployment
from tests.chaos.gate import Hold
from tests.chaos.workload import MARKER, Workload, draw_workload
from tests.system.processes import ROOT
from tests.waiting import until

MAX_START_DELAY = {Target.WORKER: 2.0, Target.SCHEDULER: 0.5}
"""Maximum seconds after which a process that starts is killed: it takes about twice as long to start."""

MAX_HOLD = 0.8
"""Seconds for requests to arrive while a worker may be held already: far less than a scheduler's patience with it."""

STEPS_IN_FLIGHT = 2
"""Steps that a worker may have at the same time."""

FLUSHED = 0.3
"""Seconds after which a scheduler's record has what happened: three times the recorder's interval."""


class CellFailure(AssertionError):
    """A cell in which something was lost, came twice or leaked."""


class Result(Struct):
    """What a cell has shown."""

    seconds: float
    requests: int
    tokens: int
    retries: int  # by clients of a gateway that was killed or drained
    detection: float | None  # mean seconds in which a gateway noticed that an engine was lost; None if none was


async def run_cell(disturbed: Deployment, undisturbed: Deployment, cell: Cell, seed: int) -> Result:
    """Run a cell. Raise `CellFailure` if it ends otherwise than undisturbed, or if the deployment is not as before."""
    rng = random.Random(f"{seed} {cell}")
    async with api_at(undisturbed.gateways[0].socket) as api:
        workload = await draw_workload(cell.moment, cell.layout.engines, rng, lambda request: ask(api, request))
        requests = [*workload.subjects, *workload.others, workload.latecomer]
        expected = await asyncio.gather(*(ask(api, request) for request in requests))
    losses = await disturbed.engine_losses()
    began = time.monotonic()
    run = _Run(disturbed, cell, rng, workload)
    try:
        outcomes = await run.run()
    except Exception as error:
        raise CellFailure(f"{cell}: {_messages(error)}") from error
    finally:
        for engine in disturbed.engines:
            engine.gate.open()
    unlike = [
        f"{request.fields}: {line}"
        for request, before, now in zip(requests, expected, outcomes, strict=True)
        for line in differences(before, now)
    ]
    if unlike:
        raise CellFailure("\n".join([f"{cell}: not as undisturbed:", *unlike]))
    try:
        await disturbed.rest()
    except TimeoutError as error:
        raise CellFailure(f"{cell}: afterwards, {error}") from error
    seconds = time.monotonic() - began
    tokens, retries = sum(outcome.num_tokens for outcome in outcomes), sum(client.retries for client in run.clients)
    return Result(seconds, len(requests), tokens, retries, (await disturbed.engine_losses()).mean_since(losses))


def _messages(error: BaseException) -> str:
    if isinstance(error, BaseExceptionGroup):
        return "; ".join(_messages(one) for one in error.exceptions)
    return f"{type(error).__name__}: {error}"


def _may_retry(strike: Strike) -> Callable[[Exception], bool]:
    """Return a function that tells after which errors a client asks the other gateway: none, unless its own fails."""
    if strike.target is not Target.GATEWAY or strike.fault is Fault.FREEZE:
        return lambda error: False
    return gateway_is_lost if strike.fault is Fault.KILL else gateway_refuses


class _Run:
    """The disturbed run of a cell."""

    def __init__(self, deployment: Deployment, cell: Cell, rng: random.Random, workload: Workload) -> None:
        self.clients: list[Client] = []
        self._deployment = deployment
        self._cell = cell
        self._rng = rng
        self._workload = workload
        self._struck = asyncio.Event()

    async def run(self) -> list[Outcome]:
        """Send the requests, let parts fail, and return the outcomes in the order subjects, others, latecomer."""
        first, second = (gateway.socket for gateway in self._deployment.gateways)
        async with api_at(first) as api, api_at(second) as other, asyncio.TaskGroup() as tasks:
            may_retry = _may_retry(self._cell.strike)
            subjects = [Client([api, other], request, may_retry) for request in self._workload.subjects]
            others = [
                Client([other, api] if at % 2 else [api, other], request, may_retry)
                for at, request in enumerate(self._workload.others)
            ]
            latecomer = Client([other], self._workload.latecomer, may_retry)
            self.clients = [*subjects, *others, latecomer]
            self._arm(self._workload.hold)
            running = [tasks.create_task(client.ask()) for client in subjects]
            await _accepted(subjects)  # first, so that they get slots before the others
            running += [tasks.create_task(client.ask()) for client in others]
            await _accepted(others)
            running.append(tasks.create_task(self._ask_late(latecomer)))
            await self._fail(await self._moment())
        return [task.result() for task in running]

    async def _ask_late(self, latecomer: Client) -> Outcome:
        await self._struck.wait()
        return await latecomer.ask()

    def _arm(self, hold: Hold) -> None:
        for engine in self._deployment.engines:
            engine.gate.open()
            engine.gate.arm(hold)

    def _open(self) -> None:
        for engine in self._deployment.engines:
            engine.gate.open()

    async def _moment(self) -> GatedEngine:
        """Wait for the cell's moment, and return the engine where the request is that it is about."""
        engines: list[GatedEngine] = []

        async def reached() -> bool:
            engines[:] = [engine for engine in self._deployment.engines if engine.gate.reached]
            if engines and self._cell.moment is Moment.QUEUE:
                figures = await self._deployment.figures()
                engines[:] = [one for one in engines if figures[one.name]["vllm:num_requests_waiting"]]
            return bool(engines)

        await until(reached, PATIENCE)
        return engines[0]

    async def _fail(self, engine: GatedEngine) -> None:
        """Let the parts fail that the cell names, and repair them once that is noticed."""
        deployment, cell = self._deployment, self._cell
        before = {child.name: child.lives for child in deployment.processes}
        noticed = deployment.watch(cell.strike, engine)
        await deployment.strike(cell.strike, engine)
        if cell.second and cell.second.when is When.AT_ONCE:
            await deployment.strike(cell.second.strike, engine)
        self._open()
        self._struck.set()
        if cell.second:
            await self._fail_again(cell.strike, cell.second.strike, cell.second.when, engine, before)
        if cell.strike.fault in (Fault.FREEZE, Fault.CUT):
            await until(noticed, PATIENCE)
            await deployment.repair(cell.strike, engine)
        await self._restarted(engine, before)

    async def _fail_again(
        self, first: Strike, second: Strike, when: When, engine: GatedEngine, before: dict[str, int]
    ) -> None:
        if when is When.RECOVERY:
            both_workers = first.target is second.target is Target.WORKER
            self._arm(self._gone_on() if both_workers else Hold("resumed", MARKER))
            await until(lambda: any(one.gate.reached for one in self._deployment.engines), PATIENCE)
            await self._deployment.strike(second, next(one for one in self._deployment.engines if one.gate.reached))
            self._open()
        elif when is When.START:
            child = self._deployment.child(first.target, engine)
            assert child is not None
            await until(lambda: child.lives > before[child.name], PATIENCE)
            await asyncio.sleep(self._rng.random() * MAX_START_DELAY[first.target])
            await self._deployment.strike(second, engine)

    def _gone_on(self) -> Hold:
        """Return the moment at which the request is known to have survived all steps that its dead worker had.

        One whose workers die twice before that is the culprit, if it was alone, and ends with an error as it should.
        """
        return replace(self._workload.hold, index=self._workload.hold.index + STEPS_IN_FLIGHT + 1)

    async def _restarted(self, engine: GatedEngine, before: dict[str, int]) -> None:
        """Wait until a process that was killed or has drained runs again."""
        if self._cell.strike.fault in (Fault.KILL, Fault.DRAIN):
            child = self._deployment.child(self._cell.strike.target, engine)
            assert child is not None
            await until(lambda: child.lives > before[child.name], PATIENCE)


async def _accepted(clients: Sequence[Client]) -> None:
    """Wait until streams are at engines. Other requests show nothing before they end."""
    streams = [client for client in clients if client.request.is_stream]
    with suppress(TimeoutError):
        async with asyncio.timeout(MAX_HOLD):
            await asyncio.gather(*(stream.accepted.wait() for stream in streams))


class Stage:
    """Runs cells of one layout, one after the other, on the same deployment as long as none fails.

    Logs and records of a failed cell are kept in `failures`.
    """

    def __init__(self, layout: Layout, model: Path, undisturbed: Deployment, failures: Path) -> None:
        self.layout = layout
        self._model, self._undisturbed, self._failures = model, undisturbed, failures
        self._stack = AsyncExitStack()
        self._deployment: Deployment | None = None

    async def run(self, cell: Cell, seed: int) -> Result:
        """Run a cell. Raise `CellFailure` with the replays of its records if it fails."""
        if self._deployment is None:
            self._deployment = await self._stack.enter_async_context(deployment(self.layout, self._model))
        try:
            return await run_cell(self._deployment, self._undisturbed, cell, seed)
        except CellFailure as failure:
            folder = self._failures / re.sub(r"\W+", "-", str(cell))
            lines = [str(failure), f"its logs and records are in {folder}", *await _keep(self._deployment, folder)]
            await self.close()
            raise CellFailure("\n".join(lines)) from failure

    async def close(self) -> None:
        """End the deployment. The next cell begins another."""
        await self._stack.aclose()
        self._deployment = None


async def _keep(failed: Deployment, folder: Path) -> list[str]:
    """Copy a failed cell's logs and records to `folder`, replay the records, and return what the replays print."""
    await asyncio.sleep(FLUSHED)
    lines = []
    for record in _copy_evidence(failed, folder):
        lines += [f"quire replay {record}", *await _replay(record)]
    return lines


def _copy_evidence(failed: Deployment, folder: Path) -> list[Path]:
    """Copy logs and records; return the copies of the latter."""
    folder.mkdir(parents=True)
    for log in failed.logs():
        shutil.copy(log, folder)
    records = [record for engine in failed.engines for record in sorted(engine.records.iterdir())]
    return [Path(shutil.copy(record, folder)) for record in records]


async def _replay(record: Path) -> list[str]:
    """Return what `quire replay` prints, its error included if it fails."""
    command = [sys.executable, "-m", "quire", "replay", str(record)]
    process = await asyncio.create_subprocess_exec(*command, cwd=ROOT, stdout=-1, stderr=asyncio.subprocess.STDOUT)
    output, _ = await process.communicate()
    return output.decode().splitlines()
