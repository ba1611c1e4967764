"""Peers are found dead. Time is a number here, and a peer is the beats that it sends and what the kernel shows."""

from collections.abc import Callable

import pytest

from shared.liveness import BUSY, FAMINE, GAP, INDULGENCE, MEMORY, SCARCE, STARVED, Liveness, Shortage, Usage
from shared.protocol import ProcessStats

TIMEOUT = 2.0
BEAT = 0.25
NEVER = float("inf")
END = 300.0  # of what is tried, in seconds
STRICKEN = 10.0  # when something happens to the peer, which was well until then

Peer = Callable[[float], ProcessStats | None]
Look = Callable[[float], Usage | None]


def well(now: float) -> ProcessStats:
    """It computes on one core and waits for it at times."""
    return ProcessStats(0.1, now, now * 0.1)


def silent_after(before: Peer = well) -> Peer:
    return lambda now: before(now) if now < STRICKEN else None


def stuck_after(cpu: float, delayed: float, before: Peer = well) -> Peer:
    """Its loop stands still from then on, while its process uses so much a second."""

    def tell(now: float) -> ProcessStats | None:
        still = now - STRICKEN
        then = before(STRICKEN)
        assert then is not None
        return (
            before(now)
            if still < 0
            else ProcessStats(still, then.cpu_seconds + cpu * still, then.cpu_wait_seconds + delayed * still)
        )

    return tell


def starved(now: float) -> ProcessStats:
    return ProcessStats(0.1, now * 0.01, now * STARVED * 1.1)


def jerky(now: float) -> ProcessStats | None:
    """It says something each other second or so."""
    return well(now) if now % (GAP + BEAT) == 0.0 else None


def looking_dead(now: float) -> Usage:
    return Usage(5.0, 1.0, False)


def looking_busy(now: float) -> Usage:
    return Usage(now * max(BUSY, SCARCE) * 1.1, 1.0, False)


def looking_starved(now: float) -> Usage:
    return Usage(now * SCARCE * 0.9, now * BUSY, False)


def looking_runnable(now: float) -> Usage:
    return Usage(5.0, 1.0, True)


def death(
    liveness: Liveness, peer: Peer, *, look: Look | None = None, short_of_cpu: bool = False, due: float = NEVER
) -> tuple[float, str]:
    """Return when it is found to be dead and why, by a judge that looks four times a second."""
    for quarter in range(int(END / BEAT)):
        now = quarter * BEAT
        if (vitals := peer(now)) is not None:
            liveness.beat(vitals, now)
        if look is not None and liveness.wants_look(now, due):
            liveness.look(look(now), now)
        if fault := liveness.fault(now, due=due, what="late", short_of_cpu=short_of_cpu):
            return now, fault
    return NEVER, ""


LAST = STRICKEN - BEAT  # its last beat, if it is silent then
SILENCE = LAST + TIMEOUT + BEAT  # when a silent one is found
LONGER = SILENCE + INDULGENCE
HANG = STRICKEN + TIMEOUT + BEAT  # when one is found that stands still


@pytest.mark.parametrize(
    ("peer", "short_of_cpu", "found"),
    [
        (well, False, NEVER),
        (starved, True, NEVER),
        (jerky, True, NEVER),
        (silent_after(), False, SILENCE),
        (silent_after(), True, LONGER),
        (silent_after(starved), False, LONGER),
        (silent_after(jerky), False, 8.75 + TIMEOUT + INDULGENCE + BEAT),
    ],
    ids=["well", "starved", "jerky", "silent", "judge short", "starved before", "jerky before"],
)
def test_silence_over_a_network(peer: Peer, short_of_cpu: bool, found: float) -> None:
    """PRC-23. One that was short of CPU when it was last heard, or whose judge is short, is given longer."""
    when, why = death(Liveness(TIMEOUT, 0.0), peer, short_of_cpu=short_of_cpu)
    assert when == found
    assert why.startswith("silent for" if found < NEVER else "")


@pytest.mark.parametrize(
    ("look", "short_of_cpu", "found"),
    [
        (looking_dead, False, SILENCE),
        (looking_dead, True, SILENCE),
        (looking_busy, False, LONGER),
        (looking_starved, False, SILENCE + FAMINE),
        (looking_runnable, False, SILENCE + FAMINE),
        (lambda now: None, True, SILENCE),
    ],
    ids=["stopped", "stopped, host busy", "computing", "starved", "runnable", "gone"],
)
def test_silence_on_the_same_host_is_looked_into(look: Look, short_of_cpu: bool, found: float) -> None:
    """PRC-23. What the kernel shows decides, and nothing else."""
    liveness = Liveness(TIMEOUT, 0.0, local=True)
    assert death(liveness, silent_after(starved), look=look, short_of_cpu=short_of_cpu)[0] == found


@pytest.mark.parametrize(
    ("peer", "computes", "found"),
    [
        (stuck_after(0.01, 0.0), True, HANG),
        (stuck_after(1.0, 0.0), True, HANG + INDULGENCE),
        (stuck_after(0.01, 0.2), True, HANG + FAMINE),
        (stuck_after(1.0, 0.0), False, HANG),
        (stuck_after(0.01, 0.2), False, HANG + FAMINE),
    ],
    ids=["deadlock", "endless loop", "waiting for a CPU", "spinning beside a GPU", "waiting for a CPU beside a GPU"],
)
def test_a_loop_that_stands_still_has_longer_while_it_works(peer: Peer, computes: bool, found: float) -> None:
    when, why = death(Liveness(TIMEOUT, 0.0, turn=TIMEOUT, computes=computes), peer)
    assert when == found
    assert why == f"its loop stands still for {found - STRICKEN:.1f} s"


def test_one_that_is_starved_in_a_step_has_minutes_though_it_hardly_finds_a_word() -> None:
    """PRC-23. Seen over tcp: a step of 59 s, and beats that came seconds apart. A burst of CPU time changes nothing."""

    def tell(now: float) -> ProcessStats | None:
        return ProcessStats(now, now * 0.01 + (0.5 if now > 60.0 else 0.0), now * 1.5) if now % 2.25 == 0.0 else None

    when, why = death(Liveness(TIMEOUT, 0.0), tell, due=30.0)
    assert when > 30.0 + FAMINE
    assert why == "late"


@pytest.mark.parametrize(("due", "found"), [(NEVER, NEVER), (20.0, 20.25)])
def test_one_without_a_limit_to_its_turns_is_judged_by_what_is_due(due: float, found: float) -> None:
    when, why = death(Liveness(TIMEOUT, 0.0), stuck_after(0.0, 0.0), due=due)
    assert (when, why) == (found, "late" if found < NEVER else "")


def test_nobody_is_silent_longer_because_of_a_deadline() -> None:
    """PRC-24. What a step may take is nothing to one that says nothing."""
    assert death(Liveness(TIMEOUT, 0.0), silent_after(), due=30.0)[0] == SILENCE


def test_whatever_it_says_counts_and_a_judge_that_slept_forgives() -> None:
    liveness = Liveness(TIMEOUT, 0.0)
    liveness.hear(5.0)
    assert liveness.fault(5.0 + TIMEOUT) == ""
    assert liveness.fault(5.1 + TIMEOUT) == "silent for 2.1 s"
    liveness.forgive(100.0)
    assert liveness.fault(105.0 + TIMEOUT) == ""
    assert liveness.fault(105.1 + TIMEOUT) != ""


def test_one_that_is_silent_is_said_to_be_unless_it_is_seen_to_work() -> None:
    remote, local = Liveness(TIMEOUT, 0.0), Liveness(TIMEOUT, 0.0, local=True)
    for tenth in range(10, 21):
        local.look(Usage(0.0, 0.0, True), tenth / 10)
    assert not remote.silent(TIMEOUT)
    assert remote.silent(TIMEOUT + 0.1)
    assert not local.silent(TIMEOUT + 0.1)
    assert local.silent(TIMEOUT + 1.1)


def test_a_judge_that_has_hardly_looked_does_not_kill() -> None:
    """PRC-23. It may have been kept from looking. What it saw long ago says nothing either way."""
    liveness = Liveness(TIMEOUT, 0.0, local=True)
    for now in (-60.0, -59.0, TIMEOUT + 0.1, TIMEOUT + 0.4):
        liveness.look(Usage(1.0, 0.0, False), now)
        assert liveness.fault(now) == ""
    liveness.look(Usage(1.0, 0.0, False), TIMEOUT + 0.7)
    assert liveness.fault(TIMEOUT + 0.7) == "silent for 2.7 s"


def test_a_shortage_is_remembered_for_a_while() -> None:
    shortage = Shortage()
    for quarter in range(41):
        shortage.note(min(quarter * BEAT, 5.0) * STARVED * 1.1, quarter * BEAT)
    assert shortage.remembered(5.0 + MEMORY)
    assert not shortage.remembered(5.0 + 1.0 + MEMORY + BEAT)
    assert not shortage.overdue(10.5)
    assert shortage.overdue(11.0)


def test_a_process_of_several_threads_that_wait_a_little_is_not_short() -> None:
    shortage = Shortage()
    for quarter in range(400):
        shortage.note(quarter * BEAT * STARVED * 0.9, quarter * BEAT)
        assert not shortage.remembered(quarter * BEAT)


def test_no_more_than_a_window_of_samples_is_kept() -> None:
    liveness = Liveness(TIMEOUT, 0.0)
    for at in range(10_000):
        liveness.beat(ProcessStats(), at / 10)
    assert len(liveness._work._samples) <= 12
