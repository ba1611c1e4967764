"""Workers: which one computes, which of its messages count, and how its loss is seen."""

import os
import signal
import subprocess
from collections.abc import Iterator

import psutil
import pytest
from msgspec import Struct
from msgspec.structs import replace

from services.scheduler.deadlines import FIRST_STEP_TIMEOUT
from services.scheduler.workers import MESSAGES, WorkerLost, WorkerReady, Workers
from shared.cpu_usage import Process
from shared.liveness import GRACE_PERIOD, CpuUsage
from shared.protocol import (
    VERSION,
    Configure,
    Configured,
    Epoch,
    Fault,
    Heartbeat,
    ProcessStats,
    Row,
    StepPlan,
    StepResult,
    Stop,
    decode_to_worker,
)
from tests.scheduler.examples import EPOCH, REGISTER
from tests.scheduler.fake_listener import FakeListener, as_listener
from tests.waiting import wait_until

CONFIGURE = Configure(EPOCH, 16, 50, 8, 100, 64)
A, B = b"worker-a", b"worker-b"
TIMEOUT = 2.0


def has_cpu(now: float) -> bool:
    """The scheduler is not short of CPU."""
    return False


def beat(process: ProcessStats | None = None, name: bytes = A) -> Heartbeat:
    return Heartbeat(name.decode(), process or ProcessStats())


class World:
    """A worker that has registered over connection 1."""

    def __init__(self) -> None:
        self.net = FakeListener()
        self.workers = Workers(as_listener(self.net), TIMEOUT, has_cpu)
        self.net.hear(A, REGISTER, 1)
        assert self.receive() == []

    def receive(self, now: float = 0.0) -> list[object]:
        return list(self.workers.receive(now))

    def hear(self, content: Struct | bytes, now: float = 0.0) -> list[object]:
        self.net.hear(A, content, 1)
        return self.receive(now)

    def activate(self) -> None:
        self.workers.configure(CONFIGURE, 0.0)
        assert self.sent(A) == [CONFIGURE]
        assert self.hear(Configured(EPOCH)) == [WorkerReady()]

    def sent(self, peer: bytes) -> list[object]:
        messages: list[object] = self.net.take(peer, decode_to_worker)
        return messages


@pytest.fixture
def world() -> World:
    return World()


@pytest.fixture
def process() -> Iterator["subprocess.Popen[bytes]"]:
    """Something that can be killed and does nothing."""
    with subprocess.Popen(["sleep", "60"]) as child:
        wait_until(lambda: psutil.Process(child.pid).name() == "sleep")
        wait_until(lambda: psutil.Process(child.pid).status() == psutil.STATUS_SLEEPING)
        yield child
        child.kill()


def plan(step: int) -> StepPlan:
    return StepPlan(EPOCH, step, [Row(0, 0, 5, 1)])


def test_a_worker_is_configured_then_ready_then_gets_plans(world: World) -> None:
    assert world.workers.candidate == REGISTER
    assert not world.workers.ready
    world.activate()
    assert world.workers.candidate is None
    assert world.workers.ready
    world.workers.send(plan(0), 1.0)
    world.workers.send(plan(1), 1.0)
    assert world.sent(A) == [plan(0), plan(1)]
    results = [StepResult(EPOCH, step, []) for step in (0, 1)]
    assert [*world.hear(results[0], 1.0), *world.hear(results[1], 1.0)] == results


@pytest.mark.parametrize(
    "result",
    [
        StepResult(EPOCH, 1, []),
        StepResult(EPOCH, 2**63 - 1, []),
        StepResult(Epoch("boot", 0), 0, []),
        StepResult(Epoch("toob", 1), 0, []),
    ],
)
def test_results_of_another_step_or_epoch_are_dropped(world: World, result: StepResult) -> None:
    world.activate()
    world.workers.send(plan(0), 0.0)
    assert world.hear(result) == []
    assert world.hear(StepResult(EPOCH, 0, [])) == [StepResult(EPOCH, 0, [])]
    assert world.hear(StepResult(EPOCH, 0, [])) == []  # once


def test_the_end_of_the_connection_is_a_loss_and_last_words_count(world: World) -> None:
    world.activate()
    world.workers.send(plan(0), 0.0)
    world.net.leave(1)
    assert world.hear(StepResult(EPOCH, 0, [])) == [StepResult(EPOCH, 0, []), WorkerLost()]
    assert world.hear(beat()) == []
    assert world.hear(Configured(EPOCH)) == []
    assert world.workers.candidate is None
    assert not world.workers.ready


def test_a_fault_is_a_loss(world: World, caplog: pytest.LogCaptureFixture) -> None:
    world.activate()
    assert world.hear(Fault(EPOCH, 3, "Traceback: why")) == [WorkerLost()]
    assert "failed in step 3:\nTraceback: why" in caplog.text
    assert world.hear(StepResult(EPOCH, 0, [])) == []


@pytest.mark.parametrize("how", ["late", "nonsense", "given up"])
@pytest.mark.parametrize("local", [True, False])
def test_one_that_is_of_no_use_is_killed_or_told_to_stop(
    how: str, local: bool, process: "subprocess.Popen[bytes]"
) -> None:
    """Killed, if the kernel says that its process is here; told to stop otherwise."""
    world = World.__new__(World)
    world.net = FakeListener()
    world.workers = Workers(as_listener(world.net), TIMEOUT, has_cpu)
    world.net.hear(A, replace(REGISTER, pid=process.pid), 1, pid=process.pid if local else None)
    world.receive()
    world.activate()
    if how == "late":
        for tenth in range(10 * int(TIMEOUT)):
            assert world.receive(tenth / 10) == []
        events = world.receive(TIMEOUT + 0.1)
    elif how == "nonsense":
        events = world.hear(b"nonsense")
    else:
        world.workers.give_up("it lies")
        events = world.receive()
    assert events == [WorkerLost()]
    assert world.sent(A) == ([] if local else [Stop()])
    if local:
        assert process.wait(10) == -signal.SIGKILL
    else:
        assert process.poll() is None


@pytest.mark.parametrize(("device", "seconds"), [("cpu", 3.0 + GRACE_PERIOD), ("cuda:0", 3.0)])
def test_one_that_is_late_but_computes_on_a_cpu_is_spared_for_a_while(
    device: str, seconds: float, process: "subprocess.Popen[bytes]", monkeypatch: pytest.MonkeyPatch
) -> None:
    """Beside a GPU a thread may spin while it waits, which says nothing."""
    clock = [0.0]
    monkeypatch.setattr(Process, "cpu_usage", lambda self: CpuUsage(clock[0], 0.0, True))
    net = FakeListener()
    workers = Workers(as_listener(net), TIMEOUT, has_cpu)
    net.hear(A, replace(REGISTER, pid=process.pid, device=device), 1, pid=process.pid)
    workers.receive(0.0)
    workers.configure(CONFIGURE, 0.0)
    net.hear(A, Configured(EPOCH), 1)
    net.hear(A, StepResult(EPOCH, 0, []), 1)
    workers.send(plan(0), 0.0)
    assert workers.receive(1.0) == [WorkerReady(), StepResult(EPOCH, 0, [])]
    workers.send(plan(1), 1.0)
    events = []
    for tenth in range(10, 10 * int(seconds + 2.0)):
        clock[0] = tenth / 10
        net.hear(b"reporter", beat(), 2)
        events += [(tenth / 10, event) for event in workers.receive(tenth / 10)]
    assert events == [(pytest.approx(seconds + 0.1, abs=0.01), WorkerLost())]
    assert process.wait(10) == -signal.SIGKILL


@pytest.mark.parametrize("phase", ["configuring", "first step", "idle"])
def test_one_that_is_stopped_is_found_in_any_phase(phase: str, process: "subprocess.Popen[bytes]") -> None:
    """PRC-24. It is seen to do nothing, so it has no more time than any other, and meanwhile nobody says that it works.

    Nothing needs to be excused on a host that is short of CPU: one that waits for a CPU would be seen to be runnable.
    """
    net = FakeListener()
    workers = Workers(as_listener(net), TIMEOUT, lambda now: True)
    net.hear(A, replace(REGISTER, pid=process.pid), 1, pid=process.pid)
    workers.receive(0.0)
    workers.configure(CONFIGURE, 0.0)
    if phase != "configuring":
        net.hear(A, Configured(EPOCH), 1)
        assert workers.receive(1.0) == [WorkerReady()]
    if phase == "first step":
        workers.send(plan(0), 1.0)
    for tenth in range(10, 30):
        net.hear(b"reporter", beat(), 2)
        assert workers.receive(tenth / 10) == []
    assert workers.progressing(2.9) == (phase != "configuring")
    process.send_signal(signal.SIGSTOP)
    wait_until(lambda: psutil.Process(process.pid).status() == psutil.STATUS_STOPPED)
    events = [(tenth / 10, event) for tenth in range(30, 60) for event in workers.receive(tenth / 10)]
    assert events == [(5.0, WorkerLost())]
    assert process.wait(10) == -signal.SIGKILL


@pytest.mark.parametrize("step", [0, 1])
def test_one_that_is_stuck_in_a_step_but_beats_has_the_time_of_the_step(step: int) -> None:
    """Over a network: what it does is known by its beats alone, and they say that it does nothing."""
    world = World()
    world.activate()
    for number in range(step):
        world.workers.send(plan(number), 0.0)
        world.hear(StepResult(EPOCH, number, []))
    world.workers.send(plan(step), 0.0)
    allowed = TIMEOUT if step else FIRST_STEP_TIMEOUT
    events = []
    for quarter in range(4 * 40):
        world.net.hear(b"reporter", beat(ProcessStats(busy_seconds=quarter / 4, cpu_seconds=5.0 + quarter / 1000)), 2)
        events += [(quarter / 4, event) for event in world.receive(quarter / 4)]
    assert events == [(allowed + 0.25, WorkerLost())]


def test_beats_of_another_name_are_no_sign_of_life(world: World) -> None:
    world.activate()
    world.net.hear(b"reporter", beat(name=B), 2)
    assert world.receive(1.9) == []
    assert world.receive(2.1) == [WorkerLost()]


def test_no_more_than_so_many_messages_are_read_in_a_turn(world: World) -> None:
    """PRC-28. A flood at this socket leaves the scheduler time for all else."""
    world.activate()
    for _ in range(MESSAGES + 1):
        world.net.hear(b"flood", beat(), 2)
    world.receive()
    assert len(world.net.inbox) == 1


def test_another_process_is_never_killed(process: "subprocess.Popen[bytes]") -> None:
    """A worker says a number that is not what the kernel says of its connection."""
    net = FakeListener()
    workers = Workers(as_listener(net), TIMEOUT, has_cpu)
    net.hear(A, replace(REGISTER, pid=process.pid), 1, pid=os.getpid())
    workers.receive(0.0)
    workers.configure(CONFIGURE, 0.0)
    workers.give_up("it lies")
    assert workers.receive(0.0) == [WorkerLost()]
    assert net.take(A, decode_to_worker) == [CONFIGURE, Stop()]
    assert process.poll() is None


def test_a_second_worker_waits_in_line(world: World) -> None:
    world.activate()
    spare = replace(REGISTER, pid=88)
    world.net.hear(B, spare, 2)
    assert world.receive() == []
    assert world.workers.candidate is None
    world.net.leave(1)
    assert world.receive() == [WorkerLost()]
    assert world.workers.candidate == spare
    world.workers.configure(CONFIGURE, 0.0)
    assert world.sent(B) == [CONFIGURE]


def test_a_spare_that_leaves_is_no_loss(world: World) -> None:
    world.activate()
    world.net.hear(B, replace(REGISTER, pid=88), 2)
    world.net.hear(B, b"nonsense", 2)
    world.net.hear(b"worker-c", replace(REGISTER, pid=99), 3)
    assert world.receive() == []
    world.net.leave(3)
    assert world.receive() == []
    assert world.workers.ready
    world.net.leave(1)
    assert world.receive() == [WorkerLost()]
    assert world.workers.candidate is None


def test_a_process_that_registers_again_takes_its_own_place() -> None:
    """It has seen the connection end before the scheduler has."""
    net = FakeListener()
    workers = Workers(as_listener(net), TIMEOUT, has_cpu)
    me = replace(REGISTER, pid=os.getpid())
    net.hear(A, me, 1, pid=os.getpid())
    workers.receive(0.0)
    workers.configure(CONFIGURE, 0.0)
    net.hear(B, me, 2, pid=os.getpid())
    assert workers.receive(0.0) == [WorkerLost()]
    assert workers.candidate == me
    workers.configure(CONFIGURE, 0.0)
    assert net.take(B, decode_to_worker) == [CONFIGURE]
    workers.stop()


def test_a_descriptor_that_is_used_again_means_the_newcomer(world: World) -> None:
    world.activate()
    world.net.leave(1)
    world.net.hear(B, replace(REGISTER, pid=88), 1)
    assert world.receive() == [WorkerLost()]
    assert world.workers.candidate == replace(REGISTER, pid=88)


def test_a_registration_of_a_connection_that_has_ended_is_none(world: World) -> None:
    world.net.hear(B, replace(REGISTER, pid=88), 2)
    world.net.leave(2)
    world.net.leave(1)
    world.receive()
    assert world.workers.candidate is None


@pytest.mark.parametrize(
    "changes", [{"version": VERSION + 1}, {"rank": 1}, {"world_size": 2}, {"kv_bytes_per_token": 0}]
)
def test_a_worker_that_does_not_fit_is_told_to_stop(world: World, changes: dict[str, int]) -> None:
    world.net.hear(B, replace(REGISTER, pid=88, **changes), 2)
    assert world.receive() == []
    assert world.sent(B) == [Stop()]
    world.net.leave(1)
    world.receive()
    assert world.workers.candidate is None


def test_a_scheduler_that_stood_still_postpones_its_deadlines(world: World) -> None:
    world.activate()
    world.workers.postpone(100.0)
    assert world.receive(100.0 + TIMEOUT) == []
    assert world.receive(100.1 + TIMEOUT) == [WorkerLost()]


def test_stop_reaches_all(world: World) -> None:
    world.activate()
    world.net.hear(B, replace(REGISTER, pid=88), 2)
    world.receive()
    world.workers.stop()
    assert world.sent(A) == world.sent(B) == [Stop()]
    assert not world.workers.ready
