"""Tests the service with scripted runners. The system tests have whole processes."""

import logging
import threading
import time
from collections.abc import Iterator
from concurrent.futures import Future
from contextlib import suppress
from pathlib import Path

import pytest
import zmq

from services.worker import adapter_loader
from services.worker import service as module
from services.worker.config import WorkerConfig
from services.worker.interface import OutOfMemory, RankLost
from services.worker.service import POLL_INTERVAL, Service
from shared.errors import ModelError
from shared.protocol import (
    AdapterLoaded,
    AdapterRefused,
    Configure,
    Configured,
    Epoch,
    Fault,
    Fork,
    Heartbeat,
    Leave,
    LoadAdapter,
    NewSequence,
    Register,
    Row,
    Sampling,
    StepPlan,
    StepResult,
    Stop,
    UnloadAdapter,
    WorkerToScheduler,
    decode_from_worker,
    encode,
    pack_tokens,
)
from tests.scripted_worker import Script, ScriptedRunner
from tests.waiting import PATIENCE, wait_until

EPOCH = Epoch("test", 1)
CONFIGURE = Configure(EPOCH, 16, 8, 4, 64, 128)


class LoggingRunner(ScriptedRunner):
    """Notes in `calls` that it was configured."""

    def __init__(self, calls: list[str]) -> None:
        super().__init__(Script())
        self.calls = calls

    def configure(self, message: Configure) -> None:
        self.calls.append("configure")


def test_on_configured_is_called_once_after_the_first_configuration() -> None:
    """Threads are pinned then: earlier, the sockets' threads would inherit a single CPU."""
    calls: list[str] = []
    service = Service(WorkerConfig(), LoggingRunner(calls), on_configured=lambda: calls.append("configured"))
    for count in (1, 2):
        service.configure(Configure(Epoch("test", count), 16, 8, 4, 64, 128))
    assert calls == ["configure", "configured", "configure"]


class HeldStep:
    """A step that the device finishes when the test says so."""

    is_done = False

    def __init__(self, plan: StepPlan) -> None:
        self.plan = plan
        self.finish = threading.Event()
        self.error = ""

    def result(self) -> StepResult:
        self.finish.wait()
        if self.error:
            raise RuntimeError(self.error)
        return StepResult(self.plan.epoch, self.plan.step, [])


class HeldRunner(ScriptedRunner):
    """A runner of a device that computes beside the host."""

    def __init__(self) -> None:
        super().__init__(Script())
        self.steps: list[HeldStep] = []
        self.adapter_calls: list[str] = []
        self.reads = threading.Event()  # an adapter is to be read
        self.read = threading.Event()  # lets adapters be read
        self.readers: set[int] = set()  # threads

    def launch(self, plan: StepPlan) -> HeldStep:  # type: ignore[override]
        self.steps.append(HeldStep(plan))
        return self.steps[-1]

    def load_adapter(self, adapter: int, path: str) -> str:
        self.reads.set()
        self.read.wait()
        self.readers.add(threading.get_native_id())
        if path == "broken":
            raise ModelError("broken: it has no tensors")
        if path == "bug":
            raise ZeroDivisionError("division by zero")
        self.adapter_calls.append(f"load {adapter}")
        return f"digest of {path}"

    def unload_adapter(self, adapter: int) -> None:
        self.adapter_calls.append(f"unload {adapter}")


class ServedRunner:
    """A service with a `HeldRunner`, and the scheduler that it registered with and that has sent `Configure`."""

    def __init__(self, address: str, runner: "HeldRunner | None" = None, **settings: int) -> None:
        self.context = zmq.Context()
        self.socket = self.context.socket(zmq.ROUTER)
        self.socket.bind(address)
        self.runner = runner or HeldRunner()
        self.service = Service(WorkerConfig(scheduler=address, **settings), self.runner)  # type: ignore[arg-type]
        self.thread = threading.Thread(target=self._run, daemon=True)
        self.thread.start()
        self.worker = b""
        register = self.receive()
        assert isinstance(register, Register)
        self.register = register
        self.send(CONFIGURE)

    def _run(self) -> None:
        with suppress(SystemExit):  # by which a test replaces the end of the process
            self.service.run()

    def send_bytes(self, data: bytes) -> None:
        self.socket.send_multipart([self.worker, data])

    def send(self, message: Configure | StepPlan | Stop | LoadAdapter | UnloadAdapter) -> None:
        self.send_bytes(encode(message))

    def receive(self, seconds: float = PATIENCE) -> WorkerToScheduler | None:
        """Return the next message that is no heartbeat, or None if none comes in time."""
        deadline = time.monotonic() + seconds
        while self.socket.poll(max(0, int((deadline - time.monotonic()) * 1000))):
            worker, data = self.socket.recv_multipart()
            message = decode_from_worker(data)
            if not isinstance(message, Heartbeat):
                self.worker = worker
                return message
        return None

    def launch(self, *steps: int) -> None:
        """Send plans without rows, and wait until the runner has launched them."""
        self.launch_plans(*(StepPlan(EPOCH, step, []) for step in steps))

    def launch_plans(self, *plans: StepPlan) -> None:
        """Send plans, and wait until the runner has launched them."""
        count = len(self.runner.steps) + len(plans)
        for plan in plans:
            self.send(plan)
        wait_until(lambda: len(self.runner.steps) >= count)

    def close(self) -> None:
        self.runner.read.set()
        for step in self.runner.steps:
            step.finish.set()
        if not self.socket.closed:
            self.send(Stop())
        self.thread.join(PATIENCE)
        self.context.destroy(linger=0)


@pytest.fixture
def served(tmp_path: Path) -> Iterator[ServedRunner]:
    served = ServedRunner(f"ipc://{tmp_path}/workers")
    assert served.receive() == Configured(EPOCH)
    yield served
    served.close()


def test_a_step_is_launched_while_the_device_computes_another(served: ServedRunner) -> None:
    served.launch(0, 1)
    assert served.receive(0.05) is None
    served.runner.steps[1].finish.set()
    assert served.receive(0.05) is None, "results come in order"
    served.runner.steps[0].finish.set()
    assert [served.receive(), served.receive()] == [StepResult(EPOCH, step, []) for step in (0, 1)]


def test_a_step_that_fails_on_the_device_is_a_fault(served: ServedRunner) -> None:
    served.launch(0, 1)
    served.runner.steps[0].error = "out of memory"
    for step in served.runner.steps:
        step.finish.set()
    fault = served.receive()
    assert isinstance(fault, Fault)
    assert (fault.epoch, fault.step) == (EPOCH, 0)
    assert "out of memory" in fault.detail
    served.thread.join(PATIENCE)
    assert not served.thread.is_alive()


def test_a_step_that_fails_names_its_requests(served: ServedRunner, caplog: pytest.LogCaptureFixture) -> None:
    """As they were in that step: the next one has been launched already, and has another request in the slot."""

    def new(slot: int, request_id: str) -> NewSequence:
        return NewSequence(slot, pack_tokens([1]), 1, [0], Sampling(max_tokens=9, seed=0), 0, request_id)

    served.launch_plans(
        StepPlan(EPOCH, 0, [Row(0, 0, 1, 1)], [new(0, "a"), new(1, "b")]),
        StepPlan(EPOCH, 1, [Row(0, 1, 1, 1), Row(2, 1, 1, 1), Row(3, 0, 1, 1)], [new(3, "c")], [Fork(0, [(2, 1)])]),
        StepPlan(EPOCH, 2, [Row(0, 0, 1, 1)], [new(0, "d")], released_slots=[0]),
    )
    served.runner.steps[1].error = "broken"
    for step in served.runner.steps:
        step.finish.set()
    assert served.receive() == StepResult(EPOCH, 0, [])
    assert isinstance(served.receive(), Fault)
    served.thread.join(PATIENCE)
    (record,) = [record for record in caplog.records if record.levelno == logging.ERROR]
    assert (record.message, record.request_ids) == ("step 1 failed", ["a", "c"])  # type: ignore[attr-defined]
    assert record.exc_info is not None


def test_a_configuration_that_fails_is_a_fault(served: ServedRunner, caplog: pytest.LogCaptureFixture) -> None:
    def configure(message: Configure) -> None:
        raise RuntimeError("the ranks did not meet")

    served.runner.configure = configure  # type: ignore[method-assign]
    served.send(CONFIGURE)
    fault = served.receive()
    assert isinstance(fault, Fault)
    assert (fault.epoch, fault.step) == (EPOCH, 0)
    assert "the ranks did not meet" in fault.detail
    assert "the configuration failed" in caplog.messages


@pytest.mark.parametrize("error", [OutOfMemory("a smaller --max-num-seqs needs less"), RankLost("rank 1 is gone")])
def test_what_needs_no_traceback_is_one_line(
    served: ServedRunner, error: OutOfMemory | RankLost, caplog: pytest.LogCaptureFixture
) -> None:
    def launch(plan: StepPlan) -> HeldStep:
        raise error

    served.runner.launch = launch  # type: ignore[method-assign]
    with caplog.at_level(logging.ERROR):
        served.send(StepPlan(EPOCH, 0, []))
        assert served.receive() == Fault(EPOCH, 0, str(error), isinstance(error, OutOfMemory))
    assert caplog.messages == [f"step 0: {error}"]


def test_the_watchdog_is_fed_when_a_step_is_finished_and_not_while_it_is_computed(
    served: ServedRunner, monkeypatch: pytest.MonkeyPatch
) -> None:
    feeds: list[float] = []
    served.launch(0)
    monkeypatch.setattr(served.service, "feed_watchdog", lambda: feeds.append(time.monotonic()))
    time.sleep(3 * POLL_INTERVAL)
    assert not feeds
    served.runner.steps[0].finish.set()
    assert served.receive() == StepResult(EPOCH, 0, [])
    assert feeds


def test_a_worker_that_is_told_to_end_computes_until_the_scheduler_says_stop(served: ServedRunner) -> None:
    served.launch(0)
    served.service.stop()
    assert served.receive() == Leave()
    served.launch(1)
    for step in served.runner.steps:
        step.finish.set()
    assert [served.receive(), served.receive()] == [StepResult(EPOCH, step, []) for step in (0, 1)]
    assert served.receive(3 * POLL_INTERVAL) is None, "it says so once"
    assert served.thread.is_alive(), "the scheduler may have more for it"
    served.send(Stop())
    served.thread.join(PATIENCE)
    assert not served.thread.is_alive()


def test_a_worker_that_was_idle_for_long_leaves_its_scheduler_too(
    served: ServedRunner, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The signal comes while it waits for a message."""
    monkeypatch.setattr(module, "LEAVE_TIMEOUT", POLL_INTERVAL)
    time.sleep(3 * POLL_INTERVAL)
    served.service.stop()
    assert served.receive() == Leave()


def test_a_worker_that_is_told_to_end_does_not_wait_for_a_silent_scheduler(
    served: ServedRunner, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "LEAVE_TIMEOUT", 3 * POLL_INTERVAL)
    served.launch(0)
    served.service.stop()
    assert served.receive() == Leave()
    served.thread.join(8 * POLL_INTERVAL)
    assert served.thread.is_alive(), "it computes"
    served.runner.steps[0].finish.set()
    assert served.receive() == StepResult(EPOCH, 0, [])
    served.thread.join(PATIENCE)
    assert not served.thread.is_alive()


def test_a_worker_that_is_told_to_end_does_not_wait_for_a_scheduler_that_is_gone(
    served: ServedRunner, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "LEAVE_TIMEOUT", 2 * PATIENCE)
    served.service.stop()
    assert served.receive() == Leave()
    served.socket.close(linger=0)
    served.thread.join(PATIENCE)
    assert not served.thread.is_alive()
    assert not caplog.messages, "both were told to end, which is no loss"


def test_a_worker_outlives_messages_that_cannot_be_read(served: ServedRunner, caplog: pytest.LogCaptureFixture) -> None:
    """However long it has served: the time that it waits for a scheduler begins with each of them."""
    for count in (2, 3):
        served.service.deadline = time.monotonic() - 1  # it has served for longer than that
        served.send_bytes(b"garbage")
        assert isinstance(served.receive(), Register)
        epoch = Epoch("test", count)
        served.send(Configure(epoch, 16, 8, 4, 64, 128))
        assert served.receive() == Configured(epoch)
    address = served.service._config.scheduler
    errors = [record.getMessage() for record in caplog.records if record.levelno == logging.ERROR]
    assert len(errors) == 2
    assert all(error.startswith(f"the scheduler at {address} sent an invalid message: ") for error in errors)


def test_steps_go_on_while_an_adapter_is_read(served: ServedRunner) -> None:
    served.send(LoadAdapter(4, "a"))
    served.launch(0, 1)
    for step in served.runner.steps:
        step.finish.set()
    assert [served.receive(), served.receive()] == [StepResult(EPOCH, step, []) for step in (0, 1)]
    served.runner.read.set()
    assert served.receive() == AdapterLoaded(4, "digest of a")


def test_adapters_are_answered_in_the_order_of_the_scheduler(served: ServedRunner) -> None:
    served.runner.read.set()
    for message in (LoadAdapter(1, "a"), LoadAdapter(2, "broken"), UnloadAdapter(1), LoadAdapter(3, "c")):
        served.send(message)
    refused = AdapterRefused(2, "broken: it has no tensors")
    expected = [AdapterLoaded(1, "digest of a"), refused, AdapterLoaded(3, "digest of c")]
    assert [served.receive() for _ in expected] == expected
    assert served.runner.adapter_calls == ["load 1", "unload 1", "load 3"]


def test_any_error_of_reading_an_adapter_is_answered(served: ServedRunner) -> None:
    """The worker lives on: requests of others do not depend on it."""
    served.runner.read.set()
    served.send(LoadAdapter(1, "bug"))
    assert served.receive() == AdapterRefused(1, "bug: ZeroDivisionError: division by zero")
    served.send(LoadAdapter(2, "a"))
    assert served.receive() == AdapterLoaded(2, "digest of a")


def test_a_new_epoch_forgets_adapters_that_are_being_read(
    served: ServedRunner, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Their answers would be taken for loaded adapters, which the runner has forgotten."""
    cancelled, wait = threading.Event(), adapter_loader.wait

    def note_and_wait(pending: list["Future[None]"]) -> None:
        cancelled.set()
        wait(pending)

    monkeypatch.setattr(adapter_loader, "wait", note_and_wait)
    for number in (1, 2):
        served.send(LoadAdapter(number, "a"))
    assert served.runner.reads.wait(PATIENCE), "the first is being read"
    served.send(Configure(Epoch("test", 2), 16, 8, 4, 64, 128))
    assert cancelled.wait(PATIENCE), "the second is not going to be read"
    served.runner.read.set()
    assert served.receive() == Configured(Epoch("test", 2))
    served.send(LoadAdapter(3, "a"))
    assert served.receive() == AdapterLoaded(3, "digest of a")
    assert served.runner.adapter_calls == ["load 1", "load 3"]


def test_adapters_of_all_connections_are_read_in_one_thread(served: ServedRunner) -> None:
    """It began before the loop's thread was pinned to a processor. A later one would share that processor with it."""
    served.runner.read.set()
    for number in (1, 2):
        served.send(LoadAdapter(number, "a"))
        assert served.receive() == AdapterLoaded(number, "digest of a")
        served.send_bytes(b"no message")
        assert isinstance(served.receive(), Register)
        served.send(CONFIGURE)
        assert served.receive() == Configured(EPOCH)
    assert len(served.runner.readers) == 1


class WaitingRunner(HeldRunner):
    """A rank whose beginning of an epoch waits for the other ranks, which come when the test says so."""

    def __init__(self) -> None:
        super().__init__()
        self.waits = threading.Event()
        self.meet = threading.Event()
        self.error = ""

    def configure(self, message: Configure) -> None:
        self.waits.set()
        self.meet.wait()
        if self.error:
            raise RuntimeError(self.error)


class ServedRank(ServedRunner):
    """A service whose runner is rank 1 of 2. `exits` are the exit statuses with which it has ended its process."""

    def __init__(self, address: str, monkeypatch: pytest.MonkeyPatch) -> None:
        self.exits: list[int] = []
        self.waiting = WaitingRunner()
        monkeypatch.setattr(module.os, "_exit", self.exit)
        super().__init__(address, self.waiting, tensor_parallel_size=2, rank=1)

    def exit(self, status: int) -> None:
        self.exits.append(status)
        self.release()  # the test's process goes on, so its threads have to end
        raise SystemExit

    def release(self) -> None:
        self.waiting.meet.set()
        for step in self.waiting.steps:
            step.finish.set()

    def join(self) -> list[int]:
        """Wait for the end of the process."""
        self.thread.join(PATIENCE)
        assert not self.thread.is_alive()
        return self.exits


@pytest.fixture
def rank(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[ServedRank]:
    rank = ServedRank(f"ipc://{tmp_path}/workers", monkeypatch)
    yield rank
    rank.release()
    rank.close()


def configured(rank: ServedRank) -> None:
    rank.waiting.meet.set()
    assert rank.receive() == Configured(EPOCH)


def test_a_rank_registers_with_its_place(rank: ServedRank) -> None:
    assert (rank.register.rank, rank.register.world_size, rank.register.num_stages) == (1, 2, 1)


@pytest.mark.parametrize("in_step", [False, True])
def test_a_rank_that_waits_for_others_hears_stop(rank: ServedRank, in_step: bool) -> None:
    if in_step:
        configured(rank)
        rank.launch(0)
    rank.send(Stop())
    assert rank.join() == [0]


@pytest.mark.parametrize("in_step", [False, True])
def test_a_rank_that_waits_for_others_does_not_outlive_its_scheduler(rank: ServedRank, in_step: bool) -> None:
    """The ranks that it waits for may not have got what it has got."""
    if in_step:
        configured(rank)
        rank.launch(0)
    assert rank.waiting.waits.wait(PATIENCE)  # otherwise the message that makes it wait may be lost with the connection
    rank.socket.close(linger=0)
    assert rank.join() == [1]


def test_a_rank_that_waits_for_nobody_registers_again(rank: ServedRank) -> None:
    configured(rank)
    rank.send_bytes(b"no message")
    assert isinstance(rank.receive(), Register)
    rank.send(CONFIGURE)
    assert rank.receive() == Configured(EPOCH)
    assert not rank.exits


def test_ranks_that_do_not_meet_are_a_fault(rank: ServedRank) -> None:
    rank.waiting.error = "rank 0 did not come"
    rank.waiting.meet.set()
    fault = rank.receive()
    assert isinstance(fault, Fault)
    assert (fault.epoch, fault.step) == (EPOCH, 0)
    assert "rank 0 did not come" in fault.detail
    assert rank.join() == []


def test_a_fault_is_sent_although_another_step_waits(rank: ServedRank, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "LINGER", 0.2)
    configured(rank)
    rank.launch(0, 1)
    rank.waiting.steps[0].error = "connection closed by peer"
    rank.waiting.steps[0].finish.set()
    assert isinstance(rank.receive(), Fault)
    assert rank.join() == [1]
