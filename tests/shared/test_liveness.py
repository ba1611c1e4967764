"""Tests when peers count as dead. Time is a number; a peer is its heartbeats and what /proc shows of its process."""

from collections.abc import Callable

import pytest

from shared.liveness import (
    GRACE_PERIOD,
    LATE_SAMPLE,
    SHORTAGE_MEMORY,
    SHORTAGE_RATE,
    STARVED_GRACE_PERIOD,
    STARVED_RATE,
    WORKING_RATE,
    CpuShortage,
    CpuUsage,
    Liveness,
)
from shared.protocol import ProcessStats

TIMEOUT = 2.0
HEARTBEAT_INTERVAL = 0.25
NEVER = float("inf")
END = 300.0  # seconds that a test simulates
TROUBLE = 10.0  # when something happens to the peer, which was well until then

Peer = Callable[[float], ProcessStats | None]
Observation = Callable[[float], CpuUsage | None]


def well(now: float) -> ProcessStats:
    """A peer that computes on one core and sometimes waits for it."""
    return ProcessStats(0.1, now, now * 0.1)


def silent_after(before: Peer = well) -> Peer:
    return lambda now: before(now) if now < TROUBLE else None


def stuck_after(cpu: float, delayed: float, before: Peer = well) -> Peer:
    """Return a peer whose loop hangs from `TROUBLE` on, while its process uses so many seconds per second."""

    def heartbeat(now: float) -> ProcessStats | None:
        still = now - TROUBLE
        then = before(TROUBLE)
        assert then is not None
        return (
            before(now)
            if still < 0
            else ProcessStats(still, then.cpu_seconds + cpu * still, then.cpu_wait_seconds + delayed * still)
        )

    return heartbeat


def starved(now: float) -> ProcessStats:
    return ProcessStats(0.1, now * 0.01, now * SHORTAGE_RATE * 1.1)


def jerky(now: float) -> ProcessStats | None:
    """A peer that sends a heartbeat only about every other second."""
    return well(now) if now % (LATE_SAMPLE + HEARTBEAT_INTERVAL) == 0.0 else None


def seems_dead(now: float) -> CpuUsage:
    return CpuUsage(5.0, 1.0, False)


def seems_busy(now: float) -> CpuUsage:
    return CpuUsage(now * max(WORKING_RATE, STARVED_RATE) * 1.1, 1.0, False)


def seems_starved(now: float) -> CpuUsage:
    return CpuUsage(now * STARVED_RATE * 0.9, now * WORKING_RATE, False)


def seems_runnable(now: float) -> CpuUsage:
    return CpuUsage(5.0, 1.0, True)


def death(
    liveness: Liveness,
    peer: Peer,
    *,
    observation: Observation | None = None,
    short_of_cpu: bool = False,
    due: float = NEVER,
) -> tuple[float, str]:
    """Return when it is found dead and why, by a watcher that checks four times a second."""
    for quarter in range(int(END / HEARTBEAT_INTERVAL)):
        now = quarter * HEARTBEAT_INTERVAL
        if (stats := peer(now)) is not None:
            liveness.note_heartbeat(stats, now)
        if observation is not None and liveness.should_observe(now, due):
            liveness.observe(observation(now), now)
        if failure := liveness.failure(now, due=due, missed="late", short_of_cpu=short_of_cpu):
            return now, failure
    return NEVER, ""


LAST = TROUBLE - HEARTBEAT_INTERVAL  # its last heartbeat, if it is silent then
SILENCE = LAST + TIMEOUT + HEARTBEAT_INTERVAL  # when a silent one is found
LONGER = SILENCE + GRACE_PERIOD
HANG = TROUBLE + TIMEOUT + HEARTBEAT_INTERVAL  # when one is found that stands still


@pytest.mark.parametrize(
    ("peer", "short_of_cpu", "died_at"),
    [
        (well, False, NEVER),
        (starved, True, NEVER),
        (jerky, True, NEVER),
        (silent_after(), False, SILENCE),
        (silent_after(), True, LONGER),
        (silent_after(starved), False, LONGER),
        (silent_after(jerky), False, 8.75 + TIMEOUT + GRACE_PERIOD + HEARTBEAT_INTERVAL),
    ],
    ids=["well", "starved", "jerky", "silent", "watcher short", "starved before", "jerky before"],
)
def test_silence_over_a_network(peer: Peer, short_of_cpu: bool, died_at: float) -> None:
    """PRC-23: a peer that was short of CPU when it was last heard, or whose watcher is, gets more time."""
    when, why = death(Liveness(TIMEOUT, 0.0), peer, short_of_cpu=short_of_cpu)
    assert when == died_at
    assert why.startswith("silent for" if died_at < NEVER else "")


@pytest.mark.parametrize(
    ("observation", "short_of_cpu", "died_at"),
    [
        (seems_dead, False, SILENCE),
        (seems_dead, True, SILENCE),
        (seems_busy, False, LONGER),
        (seems_starved, False, SILENCE + STARVED_GRACE_PERIOD),
        (seems_runnable, False, SILENCE + STARVED_GRACE_PERIOD),
        (lambda now: None, True, SILENCE),
    ],
    ids=["stopped", "stopped, host busy", "computing", "starved", "runnable", "gone"],
)
def test_silence_on_the_same_host_is_looked_into(observation: Observation, short_of_cpu: bool, died_at: float) -> None:
    """PRC-23: only what the kernel shows decides."""
    liveness = Liveness(TIMEOUT, 0.0, local=True)
    assert death(liveness, silent_after(starved), observation=observation, short_of_cpu=short_of_cpu)[0] == died_at


@pytest.mark.parametrize(
    ("peer", "cpu_is_progress", "died_at"),
    [
        (stuck_after(0.01, 0.0), True, HANG),
        (stuck_after(1.0, 0.0), True, HANG + GRACE_PERIOD),
        (stuck_after(0.01, 0.2), True, HANG + STARVED_GRACE_PERIOD),
        (stuck_after(1.0, 0.0), False, HANG),
        (stuck_after(0.01, 0.2), False, HANG + STARVED_GRACE_PERIOD),
    ],
    ids=["deadlock", "endless loop", "waiting for a CPU", "spinning beside a GPU", "waiting for a CPU beside a GPU"],
)
def test_a_loop_that_stands_still_has_longer_while_it_works(peer: Peer, cpu_is_progress: bool, died_at: float) -> None:
    when, why = death(Liveness(TIMEOUT, 0.0, turn_timeout=TIMEOUT, cpu_is_progress=cpu_is_progress), peer)
    assert when == died_at
    assert why == f"its loop stands still for {died_at - TROUBLE:.1f} s"


def test_one_that_is_starved_in_a_step_has_minutes_though_it_hardly_finds_a_word() -> None:
    """PRC-23: over tcp, a step takes 59 s with heartbeats seconds apart. A burst of CPU time changes nothing."""

    def heartbeat(now: float) -> ProcessStats | None:
        return ProcessStats(now, now * 0.01 + (0.5 if now > 60.0 else 0.0), now * 1.5) if now % 2.25 == 0.0 else None

    when, why = death(Liveness(TIMEOUT, 0.0), heartbeat, due=30.0)
    assert when > 30.0 + STARVED_GRACE_PERIOD
    assert why == "late"


@pytest.mark.parametrize(("due", "died_at"), [(NEVER, NEVER), (20.0, 20.25)])
def test_one_without_a_limit_to_its_turns_is_judged_by_what_is_due(due: float, died_at: float) -> None:
    when, why = death(Liveness(TIMEOUT, 0.0), stuck_after(0.0, 0.0), due=due)
    assert (when, why) == (died_at, "late" if died_at < NEVER else "")


def test_nobody_is_silent_longer_because_of_a_deadline() -> None:
    """PRC-24: a silent peer does not get the time that a step may take."""
    assert death(Liveness(TIMEOUT, 0.0), silent_after(), due=30.0)[0] == SILENCE


def test_whatever_it_says_counts_and_a_watcher_that_slept_forgives() -> None:
    liveness = Liveness(TIMEOUT, 0.0)
    liveness.note_message(5.0)
    assert liveness.failure(5.0 + TIMEOUT) == ""
    assert liveness.failure(5.1 + TIMEOUT) == "silent for 2.1 s"
    liveness.postpone(100.0)
    assert liveness.failure(105.0 + TIMEOUT) == ""
    assert liveness.failure(105.1 + TIMEOUT) != ""


def test_one_that_is_silent_is_said_to_be_unless_it_is_seen_to_work() -> None:
    remote, local = Liveness(TIMEOUT, 0.0), Liveness(TIMEOUT, 0.0, local=True)
    for tenth in range(10, 21):
        local.observe(CpuUsage(0.0, 0.0, True), tenth / 10)
    assert not remote.is_silent(TIMEOUT)
    assert remote.is_silent(TIMEOUT + 0.1)
    assert not local.is_silent(TIMEOUT + 0.1)
    assert local.is_silent(TIMEOUT + 1.1)


def test_a_watcher_that_has_hardly_looked_does_not_kill() -> None:
    """PRC-23: the watcher may have been kept from looking, and what it saw long ago proves nothing."""
    liveness = Liveness(TIMEOUT, 0.0, local=True)
    for now in (-60.0, -59.0, TIMEOUT + 0.1, TIMEOUT + 0.4):
        liveness.observe(CpuUsage(1.0, 0.0, False), now)
        assert liveness.failure(now) == ""
    liveness.observe(CpuUsage(1.0, 0.0, False), TIMEOUT + 0.7)
    assert liveness.failure(TIMEOUT + 0.7) == "silent for 2.7 s"


def test_one_over_a_network_that_has_hardly_told_how_it_works_is_not_killed() -> None:
    """PRC-23: its first heartbeats came close together or late, and then it works or does not."""
    for cpu_seconds, failure in ((0.0, "late"), (0.5, "")):
        liveness = Liveness(TIMEOUT, 0.0)
        for now in (0.0, 0.25):
            liveness.note_heartbeat(ProcessStats(now, cpu_seconds * now, 0.0), now)
        assert liveness.failure(1.1, due=1.0, missed="late") == ""
        liveness.note_heartbeat(ProcessStats(1.15, cpu_seconds * 1.15, 0.0), 1.15)
        assert liveness.failure(1.2, due=1.0, missed="late") == failure


def test_a_shortage_is_remembered_for_a_while() -> None:
    shortage = CpuShortage()
    for quarter in range(41):
        shortage.add(min(quarter * HEARTBEAT_INTERVAL, 5.0) * SHORTAGE_RATE * 1.1, quarter * HEARTBEAT_INTERVAL)
    assert shortage.is_recent(5.0 + SHORTAGE_MEMORY)
    assert not shortage.is_recent(5.0 + 1.0 + SHORTAGE_MEMORY + HEARTBEAT_INTERVAL)
    assert not shortage.sample_is_late(10.5)
    assert shortage.sample_is_late(11.0)


def test_a_process_of_several_threads_that_wait_a_little_is_not_short() -> None:
    shortage = CpuShortage()
    for quarter in range(400):
        shortage.add(quarter * HEARTBEAT_INTERVAL * SHORTAGE_RATE * 0.9, quarter * HEARTBEAT_INTERVAL)
        assert not shortage.is_recent(quarter * HEARTBEAT_INTERVAL)


def test_no_more_than_a_window_of_samples_is_kept() -> None:
    liveness = Liveness(TIMEOUT, 0.0)
    for at in range(10_000):
        liveness.note_heartbeat(ProcessStats(), at / 10)
    assert len(liveness._work_rate._samples) <= 12
