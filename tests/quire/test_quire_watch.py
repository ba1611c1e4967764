"""Tests which services the watch finds hung. Their processes are real here, and the test writes their heartbeats."""

import io
import os
import signal
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import cast

import psutil
import pytest

from quire.children import Child
from quire.service_log import ServiceLog
from quire.watch import MAX_HEARTBEATS, SilenceLimit, Watch
from shared.protocol import Heartbeat, ProcessStats
from tests.scheduler.fake_listener import FakeListener, as_listener
from tests.waiting import found_dead

SILENCE, TURN = 4.0, 3.0


class WatchHarness:
    """A watch of one service, whose process does nothing."""

    def __init__(self, process: "subprocess.Popen[bytes]") -> None:
        self.net = FakeListener()
        self.watch = Watch(as_listener(self.net), {"gateway": SilenceLimit(SILENCE, TURN)})
        self.child = Child("gateway", [], ServiceLog(io.BytesIO()), {})
        self.child.process = cast("object", process)  # type: ignore[assignment]  (it has a pid)
        self.pid = process.pid

    def beat(self, process_stats: ProcessStats | None = None, name: str = "gateway", pid: int | None = None) -> None:
        self.net.hear(b"reporter", Heartbeat(name, process_stats or ProcessStats()), 1, pid=pid or self.pid)

    def look(self, now: float) -> list[str]:
        result = self.watch.find_hung([self.child], now)
        assert all(child is self.child for child, _ in result)
        return [reason for _, reason in result]

    def until_dead(self, began: float, process_stats: ProcessStats | None = None) -> tuple[float, str]:
        """Return when the service is found dead and why, if it sends these stats, or no heartbeat, from `began` on."""
        for quarter in range(400):
            now = began + quarter / 4
            if process_stats is not None:
                self.beat(ProcessStats(process_stats.busy_seconds + quarter / 4))
            if reasons := self.look(now):
                return now, reasons[0]
        return float("inf"), ""


@contextmanager
def sleeping_process() -> "Iterator[subprocess.Popen[bytes]]":
    """Start a process that does nothing. It has begun to: before, it may wait for a CPU, and then it is left alone."""
    with subprocess.Popen(["sleep", "60"]) as process:
        while psutil.Process(process.pid).name() != "sleep" or psutil.Process(process.pid).status() != "sleeping":
            time.sleep(0.01)
        yield process
        process.kill()


@pytest.fixture
def harness() -> Iterator[WatchHarness]:
    with sleeping_process() as process:
        yield WatchHarness(process)


def test_one_that_has_never_beaten_may_load_for_as_long_as_it_takes(harness: WatchHarness) -> None:
    assert harness.until_dead(0.0) == (float("inf"), "")


def test_one_that_falls_silent_is_dead(harness: WatchHarness) -> None:
    harness.beat()
    assert harness.until_dead(0.0) == (SILENCE + 0.25, "silent for 4.2 s")


def test_one_whose_loop_stands_still_is_dead(harness: WatchHarness) -> None:
    assert harness.until_dead(0.0, ProcessStats(busy_seconds=0.0)) == (TURN + 0.25, "its loop stands still for 3.2 s")


def test_beats_of_another_process_do_not_count(harness: WatchHarness) -> None:
    """Heartbeats of a process that was replaced may still wait to be read."""
    harness.beat(pid=os.getpid())
    harness.beat(name="stranger")
    harness.net.hear(b"reporter", b"nonsense", 1, pid=harness.pid)
    assert harness.until_dead(0.0) == (float("inf"), "")


def test_services_of_one_role_are_told_apart(harness: WatchHarness) -> None:
    with sleeping_process() as process:
        other = Child("gateway", [], ServiceLog(io.BytesIO()), {}, label="1")
        other.process = cast("object", process)  # type: ignore[assignment]
        for quarter in range(20):
            harness.beat()
            if quarter < 2:
                harness.beat(pid=process.pid)
            hung = harness.watch.find_hung([harness.child, other], quarter / 4)
            assert [child.name for child, _ in hung] in ([], ["gateway 1"])
        assert hung != []


def test_a_new_process_is_judged_from_its_own_first_beat_on(harness: WatchHarness) -> None:
    harness.beat()
    harness.look(0.0)
    harness.pid = os.getpid()
    harness.child.process = cast("object", psutil.Process())  # type: ignore[assignment]
    assert harness.until_dead(0.25) == (float("inf"), "")


def test_one_that_was_told_to_end_is_left_to_do_so(harness: WatchHarness) -> None:
    harness.beat()
    harness.look(0.0)
    harness.child._stop_requested.set()
    assert harness.until_dead(0.25) == (float("inf"), "")


def test_a_supervisor_that_slept_forgives(harness: WatchHarness) -> None:
    harness.beat()
    harness.look(0.0)
    assert harness.look(100.0) == []
    assert harness.until_dead(100.0)[0] == 100.0 + SILENCE + 0.25


def test_one_whose_heartbeats_wait_behind_those_of_strangers_lives(harness: WatchHarness) -> None:
    """Its silence counts from when all that has come is read."""
    harness.beat()
    assert harness.look(0.0) == []
    for _ in range(40 * MAX_HEARTBEATS - 1):
        harness.beat(pid=1)
    harness.beat()
    for quarter in range(1, 41):
        assert harness.look(quarter / 4) == []
    assert harness.until_dead(10.25) == (10.0 + SILENCE + 0.25, "silent for 4.2 s")


def test_one_that_is_stopped_is_found_and_one_that_computes_is_not_soon(harness: WatchHarness) -> None:
    """Time is real here, since the kernel counts it."""
    with subprocess.Popen(["sh", "-c", "while :; do :; done"]) as busy:
        harnesses = [harness, WatchHarness(busy)]
        for one in harnesses:
            one.beat()
            one.look(time.monotonic())
        os.kill(harness.pid, signal.SIGSTOP)
        while not (reasons := harness.look(time.monotonic())):
            assert harnesses[1].look(time.monotonic()) == []
            time.sleep(0.1)
        assert found_dead(reasons[0], "silent", 4)
        assert harnesses[1].look(time.monotonic()) == []
        busy.kill()
