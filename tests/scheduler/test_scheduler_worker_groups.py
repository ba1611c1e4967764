"""Groups of ranks: when one is complete, whose answers count, and how it is lost as a whole."""

import signal
import subprocess
from collections.abc import Iterator
from typing import Any

import pytest
from msgspec import Struct
from msgspec.structs import replace

from services.scheduler.worker_group import WorkerResult
from services.scheduler.workers import WorkerAdapter, WorkerLost, WorkerReady, Workers
from shared.protocol import (
    AdapterLoaded,
    AdapterRefused,
    Configure,
    Configured,
    Epoch,
    Fault,
    Heartbeat,
    Leave,
    LoadAdapter,
    ProcessStats,
    Row,
    SampledRow,
    StepPlan,
    StepResult,
    Stop,
    UnloadAdapter,
    decode_to_worker,
    encode,
)
from shared.transport import DropReason
from tests.scheduler.examples import EPOCH, MODEL, REGISTER
from tests.scheduler.fake_listener import FakeListener, as_listener

CONFIGURE = Configure(EPOCH, 16, 50, 8, 100, 64)
TIMEOUT = 2.0
ROWS = [SampledRow(0, [5])]
STAGES = 2


def plan(step: int) -> StepPlan:
    return StepPlan(EPOCH, step, [Row(0, 0, 5, 1)])


class GroupHarness:
    """Four ranks in two stages, of which number 2 samples. Rank r is on connection r + 1."""

    def __init__(self, world_size: int = 4) -> None:
        self.net = FakeListener()
        self.workers = Workers(as_listener(self.net), TIMEOUT, lambda now: False)
        self.world_size = world_size

    def register(self, number: int, /, *, name: str = "rank", fd: int = 0, pid: int = 0, **changes: Any) -> None:
        own = {"identity": f"{name}{number}", "rank": number, "world_size": self.world_size, "num_stages": STAGES}
        register = replace(REGISTER, **{**own, "pid": pid or 1000 + number + fd, **changes})
        self.net.hear(f"{name}{number}".encode(), register, fd or number + 1, pid=pid or None)
        assert self.receive() == []

    def activate(self) -> None:
        for rank in range(self.world_size):
            self.register(rank)
        self.workers.configure(CONFIGURE, 0.0)
        events = [self.hear(rank, Configured(EPOCH)) for rank in range(self.world_size)]
        assert events == [[]] * (self.world_size - 1) + [[WorkerReady()]]
        assert self.take() == [[CONFIGURE]] * self.world_size

    def hear(self, rank: int, content: Struct | bytes, now: float = 0.0) -> list[Any]:
        self.net.hear(b"rank%d" % rank, content, rank + 1)
        return self.receive(now)

    def receive(self, now: float = 0.0) -> list[Any]:
        events = self.workers.receive(now)
        return [event.result if isinstance(event, WorkerResult) else event for event in events]

    def send(self, step: int, now: float = 0.0) -> None:
        self.workers.send(plan(step), encode(plan(step)), now)

    def take(self) -> list[list[Any]]:
        """Return what each rank was sent since the last call."""
        return [self.net.take(b"rank%d" % rank, decode_to_worker) for rank in range(self.world_size)]


@pytest.fixture
def group() -> GroupHarness:
    harness = GroupHarness()
    harness.activate()
    return harness


@pytest.fixture
def processes() -> Iterator[list["subprocess.Popen[bytes]"]]:
    """Things that can be killed and do nothing."""
    children = [subprocess.Popen(["sleep", "60"]) for _ in range(4)]
    yield children
    for child in children:
        child.kill()
        child.wait()


def test_a_group_is_complete_when_each_rank_is_there(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("INFO")
    harness = GroupHarness()
    for rank in (3, 1, 3, 0):
        harness.register(rank, name=f"n{rank}-" if rank != 3 else "rank", fd=10 + rank)
        assert harness.workers.candidate is None
    assert caplog.messages[-1] == "ranks that are still awaited: 2"
    assert "rank 0 of 4 registered" in caplog.messages[-2]
    harness.register(2)
    joint = harness.workers.candidate
    assert joint is not None
    assert (joint.num_stages, joint.kv_bytes_per_token) == (STAGES, 4 * REGISTER.kv_bytes_per_token)
    harness.workers.configure(CONFIGURE, 0.0)
    names = {name for name, _ in harness.net.sent}
    assert names == {b"n0-0", b"n1-1", b"rank2", b"rank3"}


def test_all_ranks_get_the_same_plans(group: GroupHarness) -> None:
    group.send(0)
    group.send(1)
    assert group.take() == [[plan(0), plan(1)]] * 4


@pytest.mark.parametrize("order", [(0, 1, 2, 3), (2, 0, 1, 3), (3, 2, 1, 0)])
def test_a_result_counts_when_all_ranks_have_answered(group: GroupHarness, order: tuple[int, ...]) -> None:
    group.send(0)
    results = [StepResult(EPOCH, 0, ROWS if rank == 2 else []) for rank in range(4)]
    events = [group.hear(rank, results[rank]) for rank in order]
    assert events == [[], [], [], [results[2]]]
    assert group.workers.settled


def test_a_rank_may_be_a_step_ahead_and_results_come_in_order(group: GroupHarness) -> None:
    group.send(0)
    group.send(1)
    first, second = StepResult(EPOCH, 0, ROWS), StepResult(EPOCH, 1, ROWS)
    for rank in (0, 1):
        assert group.hear(rank, StepResult(EPOCH, 0, [])) == group.hear(rank, StepResult(EPOCH, 1, [])) == []
    assert group.hear(2, first) == group.hear(2, second) == []
    assert not group.workers.settled
    assert group.hear(3, StepResult(EPOCH, 0, [])) == [first]
    assert not group.workers.settled
    assert group.hear(3, StepResult(EPOCH, 1, [])) == [second]
    assert group.workers.settled


def test_rows_of_a_rank_that_does_not_sample_are_not_looked_at(group: GroupHarness) -> None:
    group.send(0)
    lie = StepResult(EPOCH, 0, [SampledRow(0, [99])])
    assert [group.hear(rank, lie) for rank in (0, 1, 3)] == [[]] * 3
    assert group.hear(2, StepResult(EPOCH, 0, ROWS)) == [StepResult(EPOCH, 0, ROWS)]


def test_answers_that_are_not_awaited_are_dropped(group: GroupHarness) -> None:
    assert group.hear(0, StepResult(EPOCH, 0, [])) == []
    group.send(0)
    assert group.hear(0, StepResult(EPOCH, 0, [])) == group.hear(0, StepResult(EPOCH, 0, [])) == []  # twice
    assert group.hear(1, StepResult(Epoch("boot", 0), 0, [])) == group.hear(3, StepResult(EPOCH, 1, [])) == []
    assert group.net.dropped == {DropReason.UNEXPECTED: 4}
    assert not group.workers.settled


@pytest.mark.parametrize("how", ["connection", "fault", "nonsense", "comes again"])
@pytest.mark.parametrize("rank", range(4))
def test_a_group_is_lost_once_and_as_a_whole(group: GroupHarness, rank: int, how: str) -> None:
    group.send(0)
    group.take()
    if how == "connection":
        group.net.leave(rank + 1)
        events = group.receive()
    elif how == "fault":
        events = group.hear(rank, Fault(EPOCH, 0, "Traceback"))
    elif how == "nonsense":
        events = group.hear(rank, b"nonsense")
    else:
        register = replace(REGISTER, rank=rank, world_size=4, num_stages=STAGES)
        events = group.hear(rank, register)
    assert events == [WorkerLost()]
    sent = group.take()
    assert sent[:rank] + sent[rank + 1 :] == [[Stop()]] * 3, "the others are told to stop"
    assert not group.workers.ready
    assert group.workers.candidate is None
    for other in range(4):
        if other != rank:
            group.net.leave(other + 1)
    assert group.receive() == [], "and that is no other loss"
    for other in range(4):
        if other != rank or how != "comes again":
            group.register(other, name="next", fd=50 + other)
    assert group.workers.candidate is not None


def test_the_other_ranks_are_killed_on_this_host(processes: list["subprocess.Popen[bytes]"]) -> None:
    harness = GroupHarness()
    for rank, process in enumerate(processes):
        harness.register(rank, pid=process.pid)
    harness.workers.configure(CONFIGURE, 0.0)
    harness.net.leave(2)
    assert harness.receive() == [WorkerLost()]
    assert [processes[rank].wait(10) for rank in (0, 2, 3)] == [-signal.SIGKILL] * 3
    assert processes[1].poll() is None, "its connection has ended, and so does it"


@pytest.mark.parametrize("first", [0, 1])
def test_what_others_say_of_a_rank_out_of_memory_does_not_hide_it(group: GroupHarness, first: int) -> None:
    faults = [Fault(EPOCH, 0, "no connection to rank 1"), Fault(EPOCH, 0, "too little memory", True)]
    for rank in (first, 1 - first):
        group.net.hear(b"rank%d" % rank, faults[rank], rank + 1)
        group.net.leave(rank + 1)
    assert group.receive() == [WorkerLost(out_of_memory=True)]


def test_a_rank_that_is_silent_or_hangs_is_found_beside_those_that_work(group: GroupHarness) -> None:
    for tenth in range(1, 60):
        for rank in (0, 1, 3) if tenth > 30 else range(4):
            group.net.hear(b"beats", Heartbeat(f"rank{rank}", ProcessStats()), 9)
        events = group.receive(tenth / 10)
        if events:
            break
        assert group.workers.progressing(tenth / 10)
    assert events == [WorkerLost(seconds=pytest.approx(TIMEOUT + 0.1))]
    assert tenth == 51
    assert group.take() == [[Stop()]] * 4


def test_a_rank_that_does_not_acknowledge_is_found(group: GroupHarness) -> None:
    """Its own deadline counts, though the sampling rank has answered."""
    for step in (0, 1):
        group.send(step)
        for rank in (0, 1, 2, 3) if step == 0 else (0, 1, 2):
            group.hear(rank, StepResult(EPOCH, step, ROWS if rank == 2 else []))
    lost = []
    for tenth in range(1, 80):
        for rank in range(4):
            group.net.hear(b"beats", Heartbeat(f"rank{rank}", ProcessStats(busy_seconds=tenth / 10)), 9)
        lost += [(tenth, event) for event in group.receive(tenth / 10)]
    assert [event for _, event in lost] == [WorkerLost(seconds=pytest.approx(lost[0][0] / 10))]


def test_a_group_leaves_as_a_whole(group: GroupHarness) -> None:
    group.send(0)
    group.take()
    assert group.hear(1, Leave(), 1.0) == group.hear(3, Leave(), 2.0) == []
    assert (group.workers.leaving_since, group.workers.settled) == (1.0, False)
    for rank in range(4):
        group.hear(rank, StepResult(EPOCH, 0, ROWS if rank == 2 else []))
    assert group.workers.settled
    group.workers.release()
    assert group.take() == [[Stop()]] * 4
    for rank in range(4):
        group.net.leave(rank + 1)
    assert group.receive() == [], "it is not lost"


def test_a_whole_group_is_a_spare(group: GroupHarness) -> None:
    for rank in range(4):
        assert not group.workers.has_spare
        group.register(rank, name="spare", fd=20 + rank)
    assert group.workers.has_spare
    group.net.leave(1)
    assert group.receive() == [WorkerLost()]
    assert group.workers.candidate is not None
    group.workers.configure(CONFIGURE, 0.0)
    assert {name for name, body in group.net.sent if decode_to_worker(body) == CONFIGURE} == {
        b"spare%d" % rank for rank in range(4)
    }


def test_a_candidate_is_dismissed_as_a_whole() -> None:
    harness = GroupHarness()
    for rank in range(4):
        harness.register(rank)
    harness.workers.dismiss("it has another model")
    assert harness.take() == [[Stop()]] * 4
    assert harness.workers.candidate is None


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"rank": 4}, "it says to be rank 4 of 4, in 2 stages"),
        ({"num_stages": 3}, "it says to be rank 3 of 4, in 3 stages"),
        ({"world_size": 1000}, "it says to be rank 3 of 1000"),
        ({"world_size": 6}, "world_size 6 instead of 4"),
        ({"num_stages": 4}, "num_stages 4 instead of 2"),
        ({"model": replace(MODEL, fingerprint="other")}, "fingerprint='other'"),
        ({"device": "cuda:3"}, "device 'cuda' instead of 'cpu'"),
        ({"max_loras": 1, "max_cpu_loras": 2}, "max_loras 1 instead of 0, max_cpu_loras 2 instead of 0"),
    ],
)
def test_a_rank_that_disagrees_is_told_to_stop(
    changes: dict[str, Any], said: str, caplog: pytest.LogCaptureFixture
) -> None:
    harness = GroupHarness()
    for rank in range(3):
        harness.register(rank)
    harness.register(3, **changes)
    assert harness.take() == [[], [], [], [Stop()]]
    assert said in caplog.text
    assert harness.workers.candidate is None
    harness.register(3, fd=30)
    assert harness.workers.candidate is not None, "another one may come"


def test_after_all_have_gone_a_group_of_another_size_may_come(group: GroupHarness) -> None:
    for rank in range(4):
        group.net.leave(rank + 1)
    assert group.receive() == [WorkerLost()]
    group.world_size = 2
    group.register(0, fd=40)
    group.register(1, fd=41)
    assert group.workers.candidate is not None


class TestAdapters:
    """An adapter is loaded when all ranks have loaded the same files."""

    def test_it_is_loaded_once_all_have_loaded_it(self, group: GroupHarness) -> None:
        group.workers.send_adapter(LoadAdapter(7, "/a"))
        assert group.take() == [[LoadAdapter(7, "/a")]] * 4
        events = [group.hear(rank, AdapterLoaded(7, "digest")) for rank in (3, 0, 2, 1)]
        assert events == [[], [], [], [WorkerAdapter(AdapterLoaded(7, "digest"))]]
        assert group.hear(1, AdapterLoaded(7, "digest")) == []
        group.workers.send_adapter(UnloadAdapter(7))
        assert group.take() == [[UnloadAdapter(7)]] * 4

    def test_it_is_refused_if_one_cannot_load_it_and_the_others_unload_it(self, group: GroupHarness) -> None:
        group.workers.send_adapter(LoadAdapter(7, "/a"))
        group.take()
        refusal = AdapterRefused(7, "no such folder")
        answers = [AdapterLoaded(7, "digest"), refusal, AdapterLoaded(7, "digest"), AdapterLoaded(7, "digest")]
        events = [group.hear(rank, answers[rank]) for rank in (1, 0, 2, 3)]
        assert events == [[], [], [], [WorkerAdapter(refusal)]]
        unload = [UnloadAdapter(7)]
        assert group.take() == [unload, [], unload, unload]

    def test_it_is_refused_if_they_have_read_different_files(self, group: GroupHarness) -> None:
        group.workers.send_adapter(LoadAdapter(7, "/a"))
        group.take()
        for rank in range(3):
            assert group.hear(rank, AdapterLoaded(7, "digest")) == []
        refusal = AdapterRefused(7, "its files are not the same for all ranks")
        assert group.hear(3, AdapterLoaded(7, "another")) == [WorkerAdapter(refusal)]
        assert group.take() == [[UnloadAdapter(7)]] * 4
