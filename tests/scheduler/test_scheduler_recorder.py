"""Tests the files of the flight recorder: their number and size, what a crash leaves, and disks that refuse them."""

import logging
import os
import resource
import stat
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from examples import EPOCH, REGISTER, submit
from msgspec.structs import replace

from services.scheduler import recorder
from services.scheduler.config import SchedulerConfig
from services.scheduler.core import Limits, WorkerResources
from services.scheduler.core.state import dump_state
from services.scheduler.engine import Engine
from services.scheduler.record import MAGIC, Committed, Ended, Planned, Submitted, pack_entry, read_record
from services.scheduler.recorder import RecordedScheduler, Recorder, prepare_folder
from services.scheduler.replay import load_core, replay
from shared.errors import ConfigError
from shared.protocol import Configure, LoadAdapter, SampledRow, StepPlan, StepResult, UnloadAdapter, encode

LIMITS = Limits(num_blocks=64, max_num_seqs=4, max_num_batched_tokens=64, max_model_len=512)


class Clock:
    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


def make_core(folder: Path, name: str = "0", clock: Clock | None = None, max_loras: int = 0) -> RecordedScheduler:
    core = RecordedScheduler(LIMITS, Recorder(str(folder), name, "m", clock or Clock()))
    core.begin_epoch(EPOCH, LIMITS.num_blocks, WorkerResources(max_loras=max_loras, max_cpu_loras=max_loras))
    return core


def answer(plan: StepPlan) -> StepResult:
    return StepResult(plan.epoch, plan.step, [SampledRow(row.slot, [7]) for row in plan.rows if row.samples])


def step(core: RecordedScheduler, now: float = 100.0) -> None:
    plan = core.plan(now)
    assert plan is not None
    assert core.encoded_plan == encode(plan)
    result = answer(plan)
    if result.step % 2:
        core.commit(result)
    else:
        core.commit(result, encode(result))


def generate(core: RecordedScheduler, id: int, *, tokens: int = 20, now: float = 100.0) -> None:
    """Run one request to its end."""
    core.submit(submit(id, max_tokens=tokens), now)
    while core.unfinished:
        step(core, now)


def files(folder: Path) -> list[Path]:
    return sorted(folder.iterdir())


def test_the_ring_is_bounded_and_each_of_its_files_can_be_replayed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(recorder, "FILE_BYTES", 2000)
    monkeypatch.setattr(recorder, "INPUTS_PER_HEAD", 0)
    core = make_core(tmp_path)
    seen: set[Path] = set()
    for id in range(200):
        generate(core, id)
        present = set(files(tmp_path))
        assert len(present) <= recorder.MAX_FILES
        seen |= present
    core.end_record()
    assert len(seen) > 2 * recorder.MAX_FILES
    assert set(files(tmp_path)) == set(sorted(seen)[-recorder.MAX_FILES :])  # the oldest are deleted
    state = None
    for path in files(tmp_path):
        record = read_record(path)
        assert state is None or record.head.state == state
        assert sum(len(pack_entry(entry)) for entry in record.entries) < 2000 + 200
        assert record.head.continues
        replayed = load_core(record)
        assert sum(1 for _ in replay(record, replayed)) == len(record.entries) - 1
        assert isinstance(record.entries[-1], Ended)
        state = dump_state(replayed)
    assert state == dump_state(core)


def test_a_large_state_is_written_as_rarely_as_it_is_large(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The engine stands still while its state is written, so inputs have to be at least as many bytes."""
    monkeypatch.setattr(recorder, "FILE_BYTES", 100)
    core = make_core(tmp_path)
    for id in range(50):
        generate(core, id)
    core.end_record()
    records = [read_record(path) for path in files(tmp_path)]
    assert len(records) > 1
    for record in records[:-1]:
        inputs = sum(len(pack_entry(entry)) for entry in record.entries[:-1])
        assert inputs >= len(pack_entry(record.head)) > 100


def test_former_processes_count_and_other_engines_do_not(tmp_path: Path) -> None:
    for name in ["east", "east-1", "a/b", "east"] * recorder.MAX_FILES:
        make_core(tmp_path, name).end_record()
    names = [path.name.rpartition("-")[0] for path in files(tmp_path)]
    assert {name: names.count(name) for name in names} == dict.fromkeys(["east", "east-1", "a%2Fb"], recorder.MAX_FILES)


def test_nobody_else_can_read_a_record(tmp_path: Path) -> None:
    """It holds token ids, which are as private as the prompts."""
    make_core(tmp_path / "new").end_record()
    assert stat.S_IMODE((tmp_path / "new").stat().st_mode) == 0o700
    (path,) = files(tmp_path / "new")
    assert stat.S_IMODE(path.stat().st_mode) == 0o600


def test_an_idle_core_writes_nothing_however_often_it_is_asked(tmp_path: Path) -> None:
    clock = Clock()
    core = make_core(tmp_path, clock=clock)
    generate(core, 1)
    for _ in range(1000):
        clock.now += 0.25
        assert core.plan(clock.now) is None
    generate(core, 2, now=clock.now)
    core.end_record()
    record = read_record(files(tmp_path)[0])
    assert [entry.now for entry in record.entries if isinstance(entry, Planned) and entry.digest is None] == [clock.now]
    replayed = load_core(record)
    assert len(list(replay(record, replayed))) == len(record.entries) - 1
    assert dump_state(replayed) == dump_state(core)


def test_what_came_before_a_core_was_idle_is_in_the_file_soon(tmp_path: Path) -> None:
    core = make_core(tmp_path)
    generate(core, 1)
    (path,) = files(tmp_path)
    assert core.plan(100.0 + 2 * recorder.FLUSH_INTERVAL) is None
    record = read_record(path)
    assert record.torn_bytes == 0
    assert isinstance(record.entries[-1], Committed)
    replayed = load_core(record)
    for _ in replay(record, replayed):
        pass
    assert replayed.snapshot() == core.snapshot()
    core.end_record()


def test_a_core_that_is_asked_with_enough_in_flight_writes_nothing(tmp_path: Path) -> None:
    core = make_core(tmp_path)
    core.submit(submit(1), 100.0)
    plans = [core.plan(100.0) for _ in range(10)]
    assert sum(plan is not None for plan in plans) == LIMITS.depth
    core.end_record()
    record = read_record(files(tmp_path)[0])
    assert sum(isinstance(entry, Planned) for entry in record.entries) == LIMITS.depth


def test_an_idle_core_forgets_its_suspects_when_it_is_asked(tmp_path: Path) -> None:
    """So that call does something, although there is nothing to plan."""
    core = make_core(tmp_path)
    for id in (1, 2):
        core.submit(submit(id), 100.0)
    assert core.plan(100.0) is not None
    core.lose_worker(100.0)
    for id in (1, 2):
        core.abort(id)
    core.begin_epoch(replace(EPOCH, count=2), LIMITS.num_blocks)
    assert core.plan(100.0) is None
    core.end_record()
    record = read_record(files(tmp_path)[0])
    for _ in replay(record, load_core(record)):
        pass


def test_a_file_that_was_cut_off_is_read_up_to_its_last_whole_entry(tmp_path: Path) -> None:
    core = make_core(tmp_path)
    generate(core, 1)
    core.end_record()
    (path,) = files(tmp_path)
    whole, data = read_record(path), path.read_bytes()
    head = len(MAGIC + pack_entry(whole.head))
    for length in range(head, len(data)):
        path.write_bytes(data[:length])
        record = read_record(path)
        assert record.entries == whole.entries[: len(record.entries)]
        assert sum(len(pack_entry(entry)) for entry in record.entries) + record.torn_bytes == length - head
        if length % 10 == 0:
            assert len(list(replay(record, load_core(record)))) == len(record.entries)
    for length in range(len(MAGIC), head):
        path.write_bytes(data[:length])
        with pytest.raises(ConfigError, match="ends before its head is complete"):
            read_record(path)


def test_what_is_no_record_is_refused(tmp_path: Path) -> None:
    core = make_core(tmp_path)
    core.end_record()
    (path,) = files(tmp_path)
    data, record = path.read_bytes(), read_record(path)
    head = len(MAGIC + pack_entry(record.head))
    other = MAGIC + pack_entry(replace(record.head, protocol=1))
    broken_state = MAGIC + pack_entry(replace(record.head, state=b"\x90"))
    for content, said in [
        (b"", "is not a record"),
        (b"#!/bin/sh", "is not a record"),
        (data[: head + 4] + b"\xc1" + data[head + 5 :], f"is damaged at byte {head}"),
        (other, "was made with version 1 of the messages"),
    ]:
        path.write_bytes(content)
        with pytest.raises(ConfigError, match=said):
            read_record(path)
    path.write_bytes(broken_state)
    with pytest.raises(ConfigError, match="not a state of this version of the scheduler's core"):
        load_core(read_record(path))
    with pytest.raises(ConfigError, match="No such file"):
        read_record(tmp_path / "none")


@pytest.mark.parametrize("place", ["/dev/null/records", "/proc/records"])
def test_a_folder_that_cannot_be_used_names_the_flag(place: str) -> None:
    with pytest.raises(ConfigError, match=f"^--record {place}: "):
        prepare_folder(place)
    with pytest.raises(ConfigError, match=f"^--record {place}: "):
        Engine(SchedulerConfig(record=place), REGISTER)


@contextmanager
def full_disk(num_bytes: int) -> Iterator[None]:
    """Let no file grow beyond `num_bytes` in the block."""
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (num_bytes, limits[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)


def test_a_full_disk_ends_the_record_and_nothing_else(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    clock = Clock()
    core = make_core(tmp_path, clock=clock)
    (path,) = files(tmp_path)
    with caplog.at_level(logging.ERROR), full_disk(path.stat().st_size + 500):
        for id in range(50):
            clock.now += 1
            generate(core, id, now=clock.now)
    core.end_record()
    assert core.snapshot().finished_length == 50
    (line,) = caplog.messages
    assert line == f"--record {tmp_path}: File too large: nothing is recorded from now on"
    record = read_record(path)
    assert 0 < len(list(replay(record, load_core(record)))) < 50
    assert files(tmp_path) == [path]


def test_a_folder_that_vanishes_ends_the_record_and_nothing_else(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(recorder, "FILE_BYTES", 1000)
    core = make_core(tmp_path / "records")
    (path,) = files(tmp_path / "records")
    path.unlink()
    path.parent.rmdir()
    for id in range(20):
        generate(core, id)
    core.end_record()
    (line,) = caplog.messages
    assert "No such file or directory: nothing is recorded from now on" in line


KILLED = """
import os, signal, sys
sys.path.insert(0, sys.argv[2])
from pathlib import Path
from test_scheduler_recorder import *
clock = Clock()
core = make_core(Path(sys.argv[1]), clock=clock)
for id in range(10):
    clock.now += recorder.FLUSH_INTERVAL
    generate(core, id, now=clock.now)
core.submit(submit(10), clock.now)
step(core, clock.now)
core.plan(clock.now)
if sys.argv[3] == "kill":
    os.kill(os.getpid(), signal.SIGKILL)
raise RuntimeError
"""


@pytest.mark.parametrize("end", ["kill", "raise"])
def test_a_crash_leaves_a_readable_record(end: str, tmp_path: Path) -> None:
    """After SIGKILL what came since the last flush is missing; after an exception nothing is."""
    argv = [sys.executable, "-c", KILLED, str(tmp_path), str(Path(__file__).parent), end]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    subprocess.run(argv, check=False, env=environment, capture_output=True, timeout=60)
    record = read_record(files(tmp_path)[0])
    core = load_core(record)
    assert len(list(replay(record, core))) == len(record.entries)
    submitted = [entry.request.id for entry in record.entries if isinstance(entry, Submitted)]
    if end == "kill":
        assert submitted[:9] == list(range(9))
    else:
        assert submitted == list(range(11))
        assert list(core.unfinished) == [10]
        assert isinstance(record.entries[-1], Planned)


def test_an_engine_records_if_it_is_told_to(tmp_path: Path) -> None:
    engine = Engine(SchedulerConfig(record=str(tmp_path), engine="east"), REGISTER)
    assert isinstance(engine.configure(REGISTER), Configure)
    assert engine.submit(submit(1, max_tokens=2), 1.0) is None
    while (plan := engine.plan(2.0)) is not None:
        engine.commit(answer(plan))
    engine.reset_prefix_cache()
    engine.lose_worker(3.0)
    assert isinstance(engine.configure(REGISTER), Configure)
    engine.end_epoch()
    engine.abort(1)
    engine.drain()
    engine.end_record()
    record = read_record(files(tmp_path)[0])
    assert (record.head.engine, record.head.model, record.head.limits) == ("east", "m", engine.limits)
    kinds = [type(entry).__name__ for entry in record.entries]
    steps = ["Planned", "Committed"] * 2
    assert kinds == ["Began", "Submitted", *steps, "Reset", "Lost", "Began", "Left", "Aborted", "Drained", "Ended"]
    core = load_core(record)
    assert len(list(replay(record, core))) == len(record.entries) - 1
    assert replace(core.snapshot(), block_bytes=engine.snapshot.block_bytes) == engine.snapshot


def test_without_the_setting_nothing_is_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    engine = Engine(SchedulerConfig(), REGISTER)
    engine.configure(REGISTER)
    engine.end_record()
    assert files(tmp_path) == []


def test_a_result_is_recorded_the_same_whether_it_came_as_a_message_or_not(tmp_path: Path) -> None:
    contents = []
    for name, encoded in (("message", True), ("call", False)):
        core = make_core(tmp_path, name)
        core.submit(submit(1), 100.0)
        while (plan := core.plan(100.0)) is not None:
            result = answer(plan)
            core.commit(result, encode(result) if encoded else b"")
        core.end_record()
        (path,) = tmp_path.glob(f"{name}-*")
        contents.append(read_record(path).entries)
    assert contents[0] == contents[1]
    assert sum(isinstance(entry, Committed) for entry in contents[0]) == 5


def test_an_idle_core_still_loads_an_adapter_that_has_waited_for_memory(tmp_path: Path) -> None:
    """Time alone lets it go on: the last request that held the memory has ended, and no other comes."""
    core = make_core(tmp_path, max_loras=1)
    assert core.add_adapter("a", "/a") == 1
    core.take_adapter_messages()
    core.adapter_loaded(1, "d1")
    core.submit(replace(submit(1, max_tokens=3), adapter="a"), 100.0)
    step(core)
    assert core.add_adapter("b", "/b") == 2
    while core.unfinished:
        step(core)
    assert not core.take_adapter_messages()
    assert core.plan(101.0) is None
    assert core.take_adapter_messages() == [UnloadAdapter(1), LoadAdapter(2, "/b")]
    core.end_record()
    (path,) = files(tmp_path)
    record = read_record(path)
    replayed = load_core(record)
    assert sum(1 for _ in replay(record, replayed)) == len(record.entries) - 1
    assert dump_state(replayed) == dump_state(core)
