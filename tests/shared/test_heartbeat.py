"""Tests heartbeats over real sockets, and what /proc shows of processes."""

import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager

import pytest
import zmq

from shared.cpu_usage import CpuMonitor
from shared.heartbeat import HEARTBEAT_INTERVAL, HeartbeatSender, LoopTimer, Watcher
from shared.protocol import Heartbeat, decode_to_supervisor
from shared.transport import Listener, listen
from tests.waiting import PATIENCE, wait_until


@pytest.fixture
def listener() -> Iterator[Listener]:
    with (
        tempfile.TemporaryDirectory(prefix="q") as folder,
        zmq.Context() as context,
        listen(context, f"ipc://{folder}/heartbeats.sock") as listener,
    ):
        yield listener


def address(listener: Listener) -> str:
    return listener.socket.getsockopt(zmq.LAST_ENDPOINT).decode().rstrip("\0")


def next_heartbeat(listener: Listener) -> Heartbeat:
    assert listener.socket.poll(PATIENCE * 1000)
    message = listener.receive()
    assert message is not None
    assert message.pid == os.getpid()
    return decode_to_supervisor(message.body)


def test_heartbeats_come_whatever_the_loop_does_and_tell_of_its_turn(listener: Listener) -> None:
    loop, name = LoopTimer(), ["one"]
    with HeartbeatSender(loop, [Watcher(address(listener), lambda: name[0])]):
        assert next_heartbeat(listener).process.busy_seconds == 0.0
        loop.begin_turn()
        began = time.monotonic()
        while (heartbeat := next_heartbeat(listener)).process.busy_seconds < 2.5 * HEARTBEAT_INTERVAL:
            pass
        assert heartbeat.process.busy_seconds <= time.monotonic() - began + HEARTBEAT_INTERVAL
        loop.begin_wait()
        name[0] = "two"
        while (heartbeat := next_heartbeat(listener)).identity != "two":
            pass
        assert next_heartbeat(listener).process.busy_seconds == 0.0


def test_they_tell_of_cpu_time(listener: Listener) -> None:
    with HeartbeatSender(LoopTimer(), [Watcher(address(listener), lambda: "one")]):
        before = next_heartbeat(listener).process
        while time.process_time() < before.cpu_seconds + 0.2:
            pass
        wait_until(lambda: next_heartbeat(listener).process.cpu_seconds > before.cpu_seconds + 0.2)


def test_one_without_a_name_says_nothing_and_old_heartbeats_are_not_kept(listener: Listener) -> None:
    named = [""]
    with HeartbeatSender(LoopTimer(), [Watcher(address(listener), lambda: named[0])]):
        assert not listener.socket.poll(3 * HEARTBEAT_INTERVAL * 1000)
        named[0] = "one"
        assert next_heartbeat(listener).identity == "one"


def test_a_watcher_that_comes_late_hears_the_present() -> None:
    with tempfile.TemporaryDirectory(prefix="q") as folder, zmq.Context() as context:
        at, loop = f"ipc://{folder}/heartbeats.sock", LoopTimer()
        with HeartbeatSender(loop, [Watcher(at, lambda: "one")]) as sender:
            time.sleep(4 * HEARTBEAT_INTERVAL)
            loop.begin_turn()
            time.sleep(2 * HEARTBEAT_INTERVAL)
            with listen(context, at) as listener:
                assert next_heartbeat(listener).process.busy_seconds > 0
        assert not sender._thread.is_alive()


def test_watchers_may_change(listener: Listener) -> None:
    """A new one hears of this process; one that is let go is not even connected any more."""
    at = address(listener)
    with HeartbeatSender(LoopTimer(), []) as sender:
        assert not listener.socket.poll(2 * HEARTBEAT_INTERVAL * 1000)
        sender.watchers = [Watcher(at, lambda: "one"), Watcher(at, lambda: "two")]
        heard: set[str] = set()
        while heard != {"one", "two"}:
            heard.add(next_heartbeat(listener).identity)
        listener.monitor.drain()
        assert len(listener.monitor.connected) == 2
        sender.watchers = sender.watchers[1:]
        wait_until(lambda: len(listener.monitor.drain()) == 1)
        while listener.socket.poll(0):  # what the other had sent
            next_heartbeat(listener)
        assert {next_heartbeat(listener).identity for _ in range(4)} == {"two"}


@contextmanager
def child(code: str) -> Iterator["subprocess.Popen[bytes]"]:
    with subprocess.Popen([sys.executable, "-c", code]) as process:
        yield process
        process.kill()


def test_a_process_that_computes_is_told_from_one_that_is_stopped() -> None:
    with child("while True: pass") as busy:
        process = CpuMonitor(busy.pid)
        wait_until(lambda: (usage := process.cpu_usage()) is not None and usage.cpu_seconds > 0.2 and usage.runnable)
        busy.send_signal(signal.SIGSTOP)
        wait_until(lambda: (usage := process.cpu_usage()) is not None and not usage.runnable)
        before = process.cpu_usage()
        time.sleep(0.2)
        assert process.cpu_usage() == before
    assert process.cpu_usage() is None


@pytest.mark.skipif(not os.path.exists("/proc/self/schedstat"), reason="this kernel does not tell of delays")
def test_waiting_for_a_cpu_is_counted_and_never_falls() -> None:
    """Two processes share one CPU, and threads of one of them end meanwhile."""
    cpu = min(os.sched_getaffinity(0))
    code = f"import os; os.sched_setaffinity(0, {{{cpu}}})\nwhile True: pass"
    threads = f"""
import os, threading, time
os.sched_setaffinity(0, {{{cpu}}})
while True:
    thread = threading.Thread(target=lambda: [None for _ in range(10**6)])
    thread.start()
    thread.join()
"""
    with child(code), child(threads) as starved:
        process, waits = CpuMonitor(starved.pid), [0.0]
        while waits[-1] < 0.5:
            waits.append(process.cpu_wait_seconds())
            time.sleep(0.01)
        assert waits == sorted(waits)
