"""Workers: which one computes, which of its messages count, and how its loss is seen."""

import os
import signal
import subprocess
from collections.abc import Iterator

import psutil
import pytest
from msgspec import Struct
from msgspec.structs import replace

from services.scheduler import workers as module
from services.scheduler.deadlines import FIRST_STEP_TIMEOUT
from services.scheduler.worker_group import WorkerResult
from services.scheduler.workers import MAX_TURN_MESSAGES, WorkerEvent, WorkerLost, WorkerReady, Workers
from shared.cpu_usage import CpuMonitor
from shared.liveness import GRACE_PERIOD, CpuUsage
from shared.protocol import (
    VERSION,
    Configure,
    Configured,
    Epoch,
    Fault,
    Heartbeat,
    Leave,
    ProcessStats,
    Row,
    StepPlan,
    StepResult,
    Stop,
    decode_to_worker,
    encode,
)
from shared.transport import DropReason
from tests.scheduler.examples import EPOCH, REGISTER
from tests.scheduler.fake_listener import FakeListener, as_listener
from tests.waiting import wait_until

CONFIGURE = Configure(EPOCH, 16, 50, 8, 100, 64)
A, B = b"worker-a", b"worker-b"
TIMEOUT = 2.0


def has_cpu(now: float) -> bool:
    """The scheduler is not short of CPU."""
    return False


def lost_after(seconds: float) -> WorkerLost:
    """Return the loss of a worker that had given no sign of life for `seconds`."""
    return WorkerLost(seconds=pytest.approx(seconds))


def beat(process: ProcessStats | None = None, name: bytes = A) -> Heartbeat:
    return Heartbeat(name.decode(), process or ProcessStats())


def contents(events: list[WorkerEvent]) -> list[object]:
    """Return events, of results what they say, which must be what was sent."""
    for event in events:
        assert not isinstance(event, WorkerResult) or encode(event.result) == event.encoded
    return [event.result if isinstance(event, WorkerResult) else event for event in events]


class WorkersHarness:
    """A worker that has registered over connection 1."""

    def __init__(self) -> None:
        self.net = FakeListener()
        self.workers = Workers(as_listener(self.net), TIMEOUT, has_cpu)
        self.net.hear(A, REGISTER, 1)
        assert self.receive() == []

    def receive(self, now: float = 0.0) -> list[object]:
        return contents(self.workers.receive(now))

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
def harness() -> WorkersHarness:
    return WorkersHarness()


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


def test_a_worker_is_configured_then_ready_then_gets_plans(harness: WorkersHarness) -> None:
    assert harness.workers.candidate == REGISTER
    assert not harness.workers.ready
    harness.activate()
    assert harness.workers.candidate is None
    assert harness.workers.ready
    harness.workers.send(plan(0), encode(plan(0)), 1.0)
    harness.workers.send(plan(1), encode(plan(1)), 1.0)
    assert harness.sent(A) == [plan(0), plan(1)]
    results = [StepResult(EPOCH, step, []) for step in (0, 1)]
    assert [*harness.hear(results[0], 1.0), *harness.hear(results[1], 1.0)] == results


@pytest.mark.parametrize(
    "result",
    [
        StepResult(EPOCH, 1, []),
        StepResult(EPOCH, 2**63 - 1, []),
        StepResult(Epoch("boot", 0), 0, []),
        StepResult(Epoch("toob", 1), 0, []),
    ],
)
def test_results_of_another_step_or_epoch_are_dropped(harness: WorkersHarness, result: StepResult) -> None:
    harness.activate()
    harness.workers.send(plan(0), encode(plan(0)), 0.0)
    assert harness.hear(result) == []
    assert harness.hear(StepResult(EPOCH, 0, [])) == [StepResult(EPOCH, 0, [])]
    assert harness.hear(StepResult(EPOCH, 0, [])) == []  # once


def test_the_end_of_the_connection_is_a_loss_and_last_words_count(harness: WorkersHarness) -> None:
    harness.activate()
    harness.workers.send(plan(0), encode(plan(0)), 0.0)
    harness.net.leave(1)
    assert harness.hear(StepResult(EPOCH, 0, [])) == [StepResult(EPOCH, 0, []), WorkerLost()]
    assert harness.hear(beat()) == []
    assert harness.hear(Configured(EPOCH)) == []
    assert harness.workers.candidate is None
    assert not harness.workers.ready


def test_a_fault_is_a_loss(harness: WorkersHarness, caplog: pytest.LogCaptureFixture) -> None:
    harness.activate()
    assert harness.hear(Fault(EPOCH, 3, "Traceback: why")) == [WorkerLost()]
    assert "failed in step 3:\nTraceback: why" in caplog.text
    assert harness.hear(StepResult(EPOCH, 0, [])) == []


def test_a_fault_may_be_the_devices(harness: WorkersHarness) -> None:
    harness.activate()
    assert harness.hear(Fault(EPOCH, 3, "out of GPU memory", True)) == [WorkerLost(out_of_memory=True)]


@pytest.mark.parametrize("how", ["late", "nonsense", "given up"])
@pytest.mark.parametrize("local", [True, False])
def test_one_that_is_of_no_use_is_killed_or_told_to_stop(
    how: str, local: bool, process: "subprocess.Popen[bytes]"
) -> None:
    """Killed, if the kernel says that its process is here; told to stop otherwise."""
    harness = WorkersHarness.__new__(WorkersHarness)
    harness.net = FakeListener()
    harness.workers = Workers(as_listener(harness.net), TIMEOUT, has_cpu)
    harness.net.hear(A, replace(REGISTER, pid=process.pid), 1, pid=process.pid if local else None)
    harness.receive()
    harness.activate()
    if how == "late":
        for tenth in range(10 * int(TIMEOUT)):
            assert harness.receive(tenth / 10) == []
        events = harness.receive(TIMEOUT + 0.1)
    elif how == "nonsense":
        events = harness.hear(b"nonsense")
    else:
        harness.workers.give_up("it lies")
        events = harness.receive()
    assert events == [lost_after(TIMEOUT + 0.1 if how == "late" else 0.0)]
    assert harness.sent(A) == ([] if local else [Stop()])
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
    monkeypatch.setattr(CpuMonitor, "cpu_usage", lambda self: CpuUsage(clock[0], 0.0, True))
    net = FakeListener()
    workers = Workers(as_listener(net), TIMEOUT, has_cpu)
    net.hear(A, replace(REGISTER, pid=process.pid, device=device), 1, pid=process.pid)
    workers.receive(0.0)
    workers.configure(CONFIGURE, 0.0)
    net.hear(A, Configured(EPOCH), 1)
    net.hear(A, StepResult(EPOCH, 0, []), 1)
    workers.send(plan(0), encode(plan(0)), 0.0)
    assert contents(workers.receive(1.0)) == [WorkerReady(), StepResult(EPOCH, 0, [])]
    workers.send(plan(1), encode(plan(1)), 1.0)
    events = []
    for tenth in range(10, 10 * int(seconds + 2.0)):
        clock[0] = tenth / 10
        net.hear(b"reporter", beat(), 2)
        events += [(tenth / 10, event) for event in workers.receive(tenth / 10)]
    assert events == [(pytest.approx(seconds + 0.1, abs=0.01), lost_after(seconds - 0.9))]  # since it was sent the step
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
        workers.send(plan(0), encode(plan(0)), 1.0)
    for tenth in range(10, 30):
        net.hear(b"reporter", beat(), 2)
        assert workers.receive(tenth / 10) == []
    assert workers.progressing(2.9) == (phase != "configuring")
    process.send_signal(signal.SIGSTOP)
    wait_until(lambda: psutil.Process(process.pid).status() == psutil.STATUS_STOPPED)
    events = [(tenth / 10, event) for tenth in range(30, 60) for event in workers.receive(tenth / 10)]
    assert events == [(5.0, lost_after(2.1))]
    assert process.wait(10) == -signal.SIGKILL


@pytest.mark.parametrize("step", [0, 1])
def test_one_that_is_stuck_in_a_step_but_beats_has_the_time_of_the_step(step: int) -> None:
    """Over a network: what it does is known by its beats alone, and they say that it does nothing."""
    harness = WorkersHarness()
    harness.activate()
    for number in range(step):
        harness.workers.send(plan(number), encode(plan(number)), 0.0)
        harness.hear(StepResult(EPOCH, number, []))
    harness.workers.send(plan(step), encode(plan(step)), 0.0)
    allowed = TIMEOUT if step else FIRST_STEP_TIMEOUT
    events = []
    for quarter in range(4 * 40):
        harness.net.hear(b"reporter", beat(ProcessStats(busy_seconds=quarter / 4, cpu_seconds=5.0 + quarter / 1000)), 2)
        events += [(quarter / 4, event) for event in harness.receive(quarter / 4)]
    assert events == [(allowed + 0.25, lost_after(allowed + 0.25))]


def test_beats_of_another_name_are_no_sign_of_life(harness: WorkersHarness) -> None:
    harness.activate()
    harness.net.hear(b"reporter", beat(name=B), 2)
    assert harness.receive(1.9) == []
    assert harness.receive(2.1) == [lost_after(2.1)]


def test_no_more_than_so_many_messages_are_read_in_a_turn(harness: WorkersHarness) -> None:
    """PRC-28. A flood at this socket leaves the scheduler time for all else."""
    harness.activate()
    for _ in range(MAX_TURN_MESSAGES + 1):
        harness.net.hear(b"flood", beat(), 2)
    harness.receive()
    assert len(harness.net.inbox) == 1


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


def test_a_second_worker_waits_in_line(harness: WorkersHarness) -> None:
    harness.activate()
    spare = replace(REGISTER, pid=88)
    harness.net.hear(B, spare, 2)
    assert harness.receive() == []
    assert harness.workers.candidate is None
    harness.net.leave(1)
    assert harness.receive() == [WorkerLost()]
    assert harness.workers.candidate == spare
    harness.workers.configure(CONFIGURE, 0.0)
    assert harness.sent(B) == [CONFIGURE]


def test_a_spare_that_leaves_is_no_loss(harness: WorkersHarness) -> None:
    harness.activate()
    harness.net.hear(B, replace(REGISTER, pid=88), 2)
    harness.net.hear(B, b"nonsense", 2)
    harness.net.hear(b"worker-c", replace(REGISTER, pid=99), 3)
    assert harness.receive() == []
    harness.net.leave(3)
    assert harness.receive() == []
    assert harness.workers.ready
    harness.net.leave(1)
    assert harness.receive() == [WorkerLost()]
    assert harness.workers.candidate is None


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
    net.leave(2)
    workers.receive(0.0)  # and so the handle on the process is closed


def test_a_descriptor_that_is_used_again_means_the_newcomer(harness: WorkersHarness) -> None:
    harness.activate()
    harness.net.leave(1)
    harness.net.hear(B, replace(REGISTER, pid=88), 1)
    assert harness.receive() == [WorkerLost()]
    assert harness.workers.candidate == replace(REGISTER, pid=88)


def test_a_registration_of_a_connection_that_has_ended_is_none(harness: WorkersHarness) -> None:
    harness.net.hear(B, replace(REGISTER, pid=88), 2)
    harness.net.leave(2)
    harness.net.leave(1)
    harness.receive()
    assert harness.workers.candidate is None


@pytest.mark.parametrize(
    "changes",
    [
        {"version": VERSION + 1},
        {"rank": 1},
        {"world_size": 2},
        {"kv_bytes_per_token": 0},
        {"swap_bytes_per_second": 5e-324},
    ],
)
def test_a_worker_that_does_not_fit_is_told_to_stop(harness: WorkersHarness, changes: dict[str, float]) -> None:
    harness.net.hear(B, replace(REGISTER, pid=88, **changes), 2)
    assert harness.receive() == []
    assert harness.sent(B) == [Stop()]
    harness.net.leave(1)
    harness.receive()
    assert harness.workers.candidate is None


def test_a_scheduler_that_stood_still_postpones_its_deadlines(harness: WorkersHarness) -> None:
    harness.activate()
    harness.workers.postpone(100.0)
    assert harness.receive(100.0 + TIMEOUT) == []
    assert harness.receive(100.1 + TIMEOUT) == [lost_after(0.1 + TIMEOUT)]


def test_a_late_registration_of_one_that_has_left_harms_nobody(harness: WorkersHarness) -> None:
    """It was read late, and its descriptor is that of worker A by now."""
    harness.activate()
    harness.net.unreachable.add(b"left")
    harness.net.hear(b"left", replace(REGISTER, identity="left", pid=1), 1)
    assert harness.receive() == []
    assert harness.workers.ready
    assert harness.net.dropped == {DropReason.UNKNOWN_SENDER: 1}


def test_spare_workers_are_bounded(harness: WorkersHarness, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "MAX_WORKERS", 3)
    harness.activate()
    for number in range(10):
        harness.net.hear(b"%d" % number, replace(REGISTER, pid=1000 + number), 10 + number)
    assert harness.receive() == []
    assert [harness.sent(b"%d" % number) for number in range(10)] == [[], [], *[[Stop()]] * 8]
    assert harness.net.dropped == {DropReason.NOT_ADMITTED: 8}
    assert harness.workers.ready


def test_what_is_dropped_is_counted_by_its_reason(harness: WorkersHarness) -> None:
    harness.activate()
    harness.hear(StepResult(replace(EPOCH, count=7), 0, []))
    harness.hear(Configured(EPOCH))
    harness.net.hear(b"nobody", StepResult(EPOCH, 0, []), 3)
    harness.net.hear(b"nobody", Heartbeat("nobody", ProcessStats()), 3)
    harness.net.hear(b"nobody", b"garbage", 3)
    harness.receive()
    assert harness.net.dropped == {DropReason.UNEXPECTED: 2, DropReason.UNKNOWN_SENDER: 2, DropReason.MALFORMED: 1}


def test_a_worker_that_leaves_is_told_to_stop_when_it_is_released(harness: WorkersHarness) -> None:
    harness.activate()
    workers = harness.workers
    workers.send(plan(0), encode(plan(0)), 0.0)
    assert harness.sent(A) == [plan(0)]
    assert workers.leaving_since is None
    assert harness.hear(Leave(), 1.0) == harness.hear(Leave(), 2.0) == []
    assert (workers.leaving_since, workers.settled, workers.ready) == (1.0, False, True)
    assert harness.hear(StepResult(EPOCH, 0, [])) == [StepResult(EPOCH, 0, [])]
    assert workers.settled
    workers.release()
    assert harness.sent(A) == [Stop()]
    assert (workers.leaving_since, workers.ready, workers.candidate) == (None, False, None)
    harness.net.leave(1)
    assert harness.receive() == [], "it is not lost"


def test_a_worker_that_dies_before_it_is_released_is_lost(harness: WorkersHarness) -> None:
    harness.activate()
    harness.workers.send(plan(0), encode(plan(0)), 0.0)
    assert harness.hear(Leave()) == []
    harness.net.leave(1)
    assert harness.receive() == [WorkerLost()]
    assert harness.workers.leaving_since is None


def test_a_worker_in_line_leaves_at_once(harness: WorkersHarness) -> None:
    harness.activate()
    harness.net.hear(B, replace(REGISTER, identity=B.decode()), 2)
    assert harness.receive() == []
    assert harness.workers.has_spare
    harness.net.hear(B, Leave(), 2)
    assert harness.receive() == []
    assert harness.sent(B) == [Stop()]
    assert not harness.workers.has_spare
    assert (harness.workers.leaving_since, harness.workers.ready) == (None, True)
    harness.net.hear(B, Leave(), 2)
    assert harness.receive() == [], "it is not known any more"
    assert harness.net.dropped[DropReason.UNKNOWN_SENDER] == 1
