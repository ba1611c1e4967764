"""Runs a sample of the matrix: a process or link fails at a sure moment, and no client can tell afterwards.

`make chaos` runs the whole matrix.
"""

import copy
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack
from pathlib import Path

import pytest
import pytest_asyncio

from tests.chaos.cell_run import Stage
from tests.chaos.cells import (
    IPC_1,
    LAYOUTS,
    LINKS,
    SAMPLE,
    Cell,
    Fault,
    Layout,
    Moment,
    Target,
    Transport,
    When,
    all_cells,
)
from tests.chaos.client import Choice, Outcome, differences
from tests.chaos.deployment import Deployment, deployment, write_model
from tests.chaos.network import obstacle
from tests.exactness.equality import EXACT

SEED = 0

needs_processes = pytest.mark.skipif(not EXACT, reason="without the compiled kernels, bits depend on the batch")


class Stages:
    """The stage of the last layout, beside the deployment in which nothing fails."""

    def __init__(self, model: Path, undisturbed: Deployment, failures: Path) -> None:
        self._arguments = (model, undisturbed, failures)
        self._stage: Stage | None = None

    async def of(self, layout: Layout) -> Stage:
        if self._stage is None or self._stage.layout != layout:
            await self.close()
            self._stage = Stage(layout, *self._arguments)
        return self._stage

    async def close(self) -> None:
        if self._stage is not None:
            await self._stage.close()


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def stages(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Stages]:
    model = write_model(tmp_path_factory.mktemp("model"))
    async with AsyncExitStack() as stack:
        undisturbed = await stack.enter_async_context(deployment(IPC_1, model, step_delay=0.0))
        running = Stages(model, undisturbed, tmp_path_factory.mktemp("failures"))
        stack.push_async_callback(running.close)
        yield running


@needs_processes
@pytest.mark.timeout(600)
@pytest.mark.asyncio(loop_scope="module")
@pytest.mark.parametrize("cell", SAMPLE, ids=str)
async def test_nobody_notices(cell: Cell, stages: Stages) -> None:
    if cell.needs_namespaces and (reason := await obstacle()):
        pytest.skip(reason)
    stage = await stages.of(cell.layout)
    result = await stage.run(cell, SEED)
    assert result.tokens > 0


def test_the_matrix_has_each_combination_once() -> None:
    cells = all_cells()
    assert len(set(cells)) == len(cells)
    single = {(one.layout, one.strike, one.moment) for one in cells if one.second is None}
    processes, links = 3 * 3 * len(Moment) * len(LAYOUTS), len(LINKS) * len(Moment) * 2
    assert len(single) == processes + links


def test_the_sample_has_each_value_of_each_axis() -> None:
    assert {one for one in SAMPLE if not one.second} <= set(all_cells())
    assert {one.strike.target for one in SAMPLE} == set(Target)
    assert {one.strike.fault for one in SAMPLE} == set(Fault)
    assert {one.strike for one in SAMPLE} == {one.strike for one in all_cells()}
    assert {one.moment for one in SAMPLE} == set(Moment)
    assert {one.layout.transport for one in SAMPLE} == set(Transport)
    assert {one.layout.engines for one in SAMPLE} == {1, 2}
    assert {one.second.when for one in SAMPLE if one.second} == set(When)


@pytest.mark.parametrize(
    ("field", "value", "said"),
    [
        ("text", "ab", "text of choice 0: 'ab' instead of 'abc'"),
        ("logprobs", [["a", -1.0], ["b", -2.5]], "logprobs of choice 0: 2 entries instead of 2, different from 1 on"),
        ("logprobs", [["a", -1.0]], "logprobs of choice 0: 1 entries instead of 2, different from 1 on"),
        ("prompt_logprobs", [None], "prompt_logprobs of choice 0: [None] instead of None"),
        ("finish_reason", "length", "finish_reason of choice 0: 'length' instead of 'stop'"),
        ("stop_reason", None, "stop_reason of choice 0: None instead of 'd'"),
    ],
)
def test_any_difference_is_found(field: str, value: object, said: str) -> None:
    undisturbed = Outcome({0: Choice("abc", [["a", -1.0], ["b", -2.0]], None, "stop", "d")}, {"total_tokens": 3})
    other = copy.deepcopy(undisturbed)
    assert differences(undisturbed, other) == []
    setattr(other.choices[0], field, value)
    assert differences(undisturbed, other) == [said]
    assert differences(undisturbed, Outcome(undisturbed.choices, {"total_tokens": 4})) == [
        "usage {'total_tokens': 4} instead of {'total_tokens': 3}"
    ]
    assert differences(undisturbed, Outcome({}, undisturbed.usage)) == ["choices [] instead of [0]"]
