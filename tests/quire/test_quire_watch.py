"""Which services are dead, by their own beats: their processes are real here, their beats are written by the test."""

import io
import os
import signal
import subprocess
import time
from collections.abc import Iterator
from typing import cast

import psutil
import pytest

from quire.children import Child, ServiceLog
from quire.watch import SilenceLimit, Watch
from shared.protocol import Heartbeat, ProcessStats
from tests.scheduler.fake_listener import FakeListener, as_listener

SILENCE, TURN = 4.0, 3.0


class World:
    """One service whose process does nothing, and its supervisor's watch."""

    def __init__(self, process: "subprocess.Popen[bytes]") -> None:
        self.net = FakeListener()
        self.watch = Watch(as_listener(self.net), {"gateway": SilenceLimit(SILENCE, TURN)})
        self.child = Child("gateway", [], ServiceLog(io.BytesIO()), {})
        self.child.process = cast("object", process)  # type: ignore[assignment]  (it has a pid)
        self.pid = process.pid

    def beat(self, vitals: ProcessStats | None = None, name: str = "gateway", pid: int | None = None) -> None:
        self.net.hear(b"reporter", Heartbeat(name, vitals or ProcessStats()), 1, pid=pid or self.pid)

    def look(self, now: float) -> list[str]:
        result = self.watch.find_hung([self.child], now)
        assert all(child is self.child for child, _ in result)
        return [fault for _, fault in result]

    def until_dead(self, began: float, vitals: ProcessStats | None = None) -> tuple[float, str]:
        """Return when it is found dead and why, if from then on it beats so, or not at all."""
        for quarter in range(400):
            now = began + quarter / 4
            if vitals is not None:
                self.beat(ProcessStats(vitals.busy_seconds + quarter / 4))
            if faults := self.look(now):
                return now, faults[0]
        return float("inf"), ""


@pytest.fixture
def world() -> Iterator[World]:
    with subprocess.Popen(["sleep", "60"]) as process:
        while psutil.Process(process.pid).name() != "sleep" or psutil.Process(process.pid).status() != "sleeping":
            time.sleep(0.01)
        yield World(process)
        process.kill()


def test_one_that_has_never_beaten_may_load_for_as_long_as_it_takes(world: World) -> None:
    assert world.until_dead(0.0) == (float("inf"), "")


def test_one_that_falls_silent_is_dead(world: World) -> None:
    world.beat()
    assert world.until_dead(0.0) == (SILENCE + 0.25, "silent for 4.2 s")


def test_one_whose_loop_stands_still_is_dead(world: World) -> None:
    assert world.until_dead(0.0, ProcessStats(busy_seconds=0.0)) == (TURN + 0.25, "its loop stands still for 3.2 s")


def test_beats_of_another_process_do_not_count(world: World) -> None:
    """Beats of a process that was replaced may still be there to be read."""
    world.beat(pid=os.getpid())
    world.beat(name="stranger")
    world.net.hear(b"reporter", b"nonsense", 1, pid=world.pid)
    assert world.until_dead(0.0) == (float("inf"), "")


def test_a_new_process_is_judged_from_its_own_first_beat_on(world: World) -> None:
    world.beat()
    world.look(0.0)
    world.pid = os.getpid()
    world.child.process = cast("object", psutil.Process())  # type: ignore[assignment]
    assert world.until_dead(0.25) == (float("inf"), "")


def test_one_that_was_told_to_end_is_left_to_do_so(world: World) -> None:
    world.beat()
    world.look(0.0)
    world.child._stop_requested.set()
    assert world.until_dead(0.25) == (float("inf"), "")


def test_a_supervisor_that_slept_forgives(world: World) -> None:
    world.beat()
    world.look(0.0)
    assert world.look(100.0) == []
    assert world.until_dead(100.0)[0] == 100.0 + SILENCE + 0.25


def test_one_that_is_stopped_is_found_and_one_that_computes_is_not_soon(world: World) -> None:
    """Time is real here, for it is the kernel that tells."""
    with subprocess.Popen(["sh", "-c", "while :; do :; done"]) as busy:
        worlds = [world, World(busy)]
        for one in worlds:
            one.beat()
            one.look(time.monotonic())
        os.kill(world.pid, signal.SIGSTOP)
        began = time.monotonic()
        while not (fault := world.look(time.monotonic())):
            assert worlds[1].look(time.monotonic()) == []
            time.sleep(0.1)
        assert fault[0].startswith("silent for 4.")
        assert time.monotonic() - began < 10.0
        assert worlds[1].look(time.monotonic()) == []
        busy.kill()
