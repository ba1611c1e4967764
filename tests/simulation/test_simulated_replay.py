"""Tests the flight recorder on random workloads: a record leads to the same plans and states, or says which differ."""

import re
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import simulated_engine
import workloads
from mutants import CORE, mutated
from test_simulation_mutants import MUTANTS

from services.scheduler import recorder
from services.scheduler.core import Limits, Scheduler
from services.scheduler.core.state import dump_state, load_state
from services.scheduler.record import Committed, Record, read_record
from services.scheduler.recorder import RecordedScheduler, Recorder
from services.scheduler.replay import load_core, replay
from shared.errors import ReplayFailure
from shared.protocol import StepPlan

WORKLOADS = 150


@contextmanager
def recording(folder: Path) -> Iterator[None]:
    """Let the engines of the block record what they do, a file or more each; the folder must be empty at first."""

    def make(limits: Limits) -> RecordedScheduler:
        return RecordedScheduler(limits, Recorder(str(folder), "0", "simulated", lambda: 1000.0))

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(simulated_engine, "Scheduler", make)
        yield


def record(seed: int, folder: Path) -> tuple[Scheduler, list[Record]]:
    """Run a workload; return its core at the end, and the files of its record."""
    with recording(folder):
        core = workloads.run(seed).core
    assert isinstance(core, RecordedScheduler)
    core.end_record()
    return core, [read_record(path) for path in sorted(folder.iterdir())]


def run_again(files: list[Record]) -> Scheduler:
    """Replay all files; return the core at the end. Each file but the first must begin with the end of the last."""
    core = load_core(files[0])
    for file in files:
        assert file.head.state == dump_state(core)
        core = load_core(file)
        for _ in replay(file, core):
            pass
    return core


@pytest.mark.parametrize("file_bytes", [recorder.FILE_BYTES, 1000])
def test_a_record_leads_to_the_same_plans_and_the_same_state(
    file_bytes: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In small files, it does so from each of many moments."""
    monkeypatch.setattr(recorder, "FILE_BYTES", file_bytes)
    monkeypatch.setattr(recorder, "INPUTS_PER_HEAD", 0)
    monkeypatch.setattr(recorder, "MAX_FILES", 10_000)
    num_files = 0
    for seed in range(WORKLOADS):
        core, files = record(seed, tmp_path / str(seed))
        assert dump_state(run_again(files)) == dump_state(core), f"workload {seed}"
        num_files += len(files)
    assert num_files == WORKLOADS if file_bytes > 1000 else num_files > 2 * WORKLOADS


def test_a_core_goes_on_from_its_state_at_any_moment(monkeypatch: pytest.MonkeyPatch) -> None:
    """After each call, the engine's core is replaced by one with the same state: the simulation sees no difference."""
    check = simulated_engine.SimulatedEngine.check

    def reload_and_check(engine: Any) -> None:
        state = dump_state(engine.core)
        engine.core = load_state(state)
        assert dump_state(engine.core) == state
        check(engine)

    monkeypatch.setattr(simulated_engine.SimulatedEngine, "check", reload_and_check)
    for seed in range(WORKLOADS):
        workloads.run(seed)


@pytest.mark.parametrize("name", ["later requests pass the first", "the first is the victim", "a slot is not released"])
def test_a_replay_names_the_first_plan_that_a_wrong_core_makes(name: str, tmp_path: Path) -> None:
    for seed in range(600):
        _, (file,) = record(seed, tmp_path / str(seed))
        plans = [one.outcome for one in replay(file, load_core(file)) if isinstance(one.outcome, StepPlan)]
        with mutated(CORE, MUTANTS[name]):
            same, failure = replay_as_far_as_possible(file)
        assert same == plans[: len(same)]
        if "differs from the recorded one" in failure:
            assert re.search(rf"plan {len(same)} \(input \d+, ", failure)
            return
    raise AssertionError("no workload shows the mutant")


def replay_as_far_as_possible(file: Record) -> tuple[list[StepPlan], str]:
    """Return the plans that a replay makes, and the error in which it ends; empty if it does not."""
    plans: list[StepPlan] = []
    try:
        for replayed in replay(file, load_core(file)):
            if isinstance(replayed.outcome, StepPlan):
                plans.append(replayed.outcome)
    except ReplayFailure as failure:
        return plans, str(failure)
    return plans, ""


def test_a_replay_that_ends_in_another_state_fails(tmp_path: Path) -> None:
    """The last result leads to no plan any more, so only the state shows that it is missing."""
    _, (file,) = record(3, tmp_path)
    index = max(at for at, entry in enumerate(file.entries) if isinstance(entry, Committed))
    del file.entries[index]
    with pytest.raises(ReplayFailure, match="the plans are the same, but the state at the end differs"):
        for _ in replay(file, load_core(file)):
            pass


def test_an_exception_of_the_core_is_in_the_record(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The input that it came from is written before the core acts on it."""

    class Broken(Exception):
        pass

    def fail(*_: object) -> None:
        raise Broken("a bug")

    with recording(tmp_path):
        engine = simulated_engine.SimulatedEngine(
            Limits(num_blocks=8, max_num_seqs=2, max_num_batched_tokens=4, max_model_len=8)
        )
    engine.accept([1, 2], 3)
    monkeypatch.setattr("services.scheduler.core.scheduler.Planner.schedule", fail)
    with pytest.raises(Broken):
        engine.core.plan(engine.now)
    engine.core.end_record()
    (path,) = tmp_path.iterdir()
    file = read_record(path)
    with pytest.raises(ReplayFailure, match=r"the core fails at input 2, Planned\(now=1000.0, .*Broken\('a bug'\)"):
        for _ in replay(file, load_core(file)):
            pass
