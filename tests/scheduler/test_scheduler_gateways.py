"""Gateways: which request is whose, what is left when a gateway goes, and what waits for a slow one."""

import math
import time

import msgspec
import pytest
from msgspec import Struct
from msgspec.structs import replace

from services.scheduler import gateways as module
from services.scheduler.gateways import MAX_CLOCK_SKEW, MAX_RESUMED_AGE, MAX_ROWS, MAX_TURN_BYTES, Gateways, Reset
from shared.liveness import GATEWAY_TIMEOUT, GRACE_PERIOD
from shared.protocol import (
    VERSION,
    Abort,
    Accepted,
    FinishReason,
    Heartbeat,
    Hello,
    ModelInfo,
    PrefixCacheReset,
    ProcessStats,
    Progress,
    ProgressRow,
    Refusal,
    Refused,
    ResetPrefixCache,
    Snapshot,
    Status,
    Submit,
    UnknownGateway,
    Welcome,
    decode_to_gateway,
)
from shared.transport import DropReason
from tests.scheduler.examples import MODEL, submit
from tests.scheduler.fake_listener import FakeListener, as_listener

WELCOME = Welcome(VERSION, "0", "boot", MODEL, 100, 8)
STATUS = Status(True, False, Snapshot())
A, B = b"gateway-a", b"gateway-b"


class GatewaysHarness:
    """Two gateways that have said Hello, over connections 1 and 2."""

    def __init__(self) -> None:
        self.net = FakeListener()
        self.gateways = Gateways(as_listener(self.net), lambda now: False)
        self.net.hear(A, Hello(VERSION, "a"), 1)
        self.net.hear(B, Hello(VERSION, "b"), 2)
        self.unfinished: dict[int, int] = {}  # samples of each request, as an engine would count them
        assert self.receive() == []

    @property
    def remembered(self) -> list[int]:
        """The engine's ids of the requests whose gateways are known."""
        return list(self.gateways._origins)

    def receive(self, now: float = 0.0, max_messages: int = 100) -> list[Submit | Abort | Reset]:
        return self.gateways.receive(max_messages, now)

    def submit(self, peer: bytes, id: int, n: int = 1) -> int:
        """Return the engine's id."""
        self.net.hear(peer, submit(id, n=n), 1 if peer == A else 2)
        (request,) = self.receive()
        assert isinstance(request, Submit)
        self.unfinished[request.id] = n
        return request.id

    def deliver(self, rows: list[ProgressRow]) -> None:
        """Deliver rows as an engine gives them: after the last row of a request it is unfinished no more."""
        for row in rows:
            if row.finish_reason is not None:
                self.unfinished[row.id] -= 1
                if not self.unfinished[row.id]:
                    del self.unfinished[row.id]
        self.gateways.deliver(rows, self.unfinished)

    def beat(self, peer: bytes, process: ProcessStats | None = None) -> None:
        """Send a heartbeat as the peer's reporter does, over a connection of its own."""
        self.net.hear(b"reporter", Heartbeat(peer.decode(), process or ProcessStats()), 99)

    def flush(self, peer: bytes, now: float = 0.0) -> list[object]:
        self.gateways.flush(now)
        messages: list[object] = self.net.take(peer, decode_to_gateway)
        return messages

    @property
    def empty(self) -> bool:
        """Nothing is remembered of any request."""
        return not self.remembered and all(not peer.ids for peer in self.gateways._gateways.values())


@pytest.fixture
def harness() -> GatewaysHarness:
    return GatewaysHarness()


def row(id: int, *, sample: int = 0, position: int = 0, finish: FinishReason | None = None) -> ProgressRow:
    return ProgressRow(id, sample, position, [7], finish_reason=finish)


def test_requests_of_two_gateways_under_the_same_id_are_two(harness: GatewaysHarness) -> None:
    first, second = harness.submit(A, 5), harness.submit(B, 5)
    assert first != second
    harness.deliver([row(first), row(second, position=3)])
    assert harness.flush(A) == [Progress([row(5)])]
    assert harness.flush(B) == [Progress([row(5, position=3)])]


def test_a_step_is_one_message_a_gateway(harness: GatewaysHarness) -> None:
    ids = [harness.submit(A, id) for id in range(3)]
    harness.deliver([row(id) for id in ids])
    harness.deliver([row(ids[0], position=1)])
    assert harness.flush(A) == [Progress([row(0), row(1), row(2), row(0, position=1)])]
    assert harness.flush(A) == []


def test_a_request_is_forgotten_with_its_last_sample(harness: GatewaysHarness) -> None:
    id = harness.submit(A, 5, n=2)
    harness.deliver([row(id, sample=1, finish=FinishReason.STOP)])
    assert harness.remembered == [id]
    harness.deliver([row(id, sample=0, finish=FinishReason.LENGTH)])
    assert harness.empty
    harness.deliver([row(id)])  # nobody's
    assert [len(message.rows) for message in harness.flush(A) if isinstance(message, Progress)] == [2]
    assert harness.submit(A, 5) != id


def test_a_refused_request_is_forgotten_and_said_under_its_own_id(harness: GatewaysHarness) -> None:
    id = harness.submit(A, 5)
    harness.gateways.refuse(Refused(id, Refusal.QUEUE_FULL, "full", 2.0))
    assert harness.flush(A) == [Refused(5, Refusal.QUEUE_FULL, "full", 2.0)]
    assert harness.empty


def test_an_id_in_use_is_refused_and_the_first_request_lives(harness: GatewaysHarness) -> None:
    id = harness.submit(A, 5)
    harness.net.hear(A, submit(5), 1)
    assert harness.receive() == []
    (refused,) = harness.flush(A)
    assert isinstance(refused, Refused)
    assert (refused.id, refused.reason) == (5, Refusal.INVALID)
    harness.deliver([row(id)])
    assert harness.flush(A) == [Progress([row(5)])]


def test_aborts_go_to_the_engine_under_its_id_and_those_of_others_nowhere(harness: GatewaysHarness) -> None:
    id = harness.submit(A, 5)
    for peer, fd, abort in ((A, 1, Abort(5, 2)), (A, 1, Abort(6)), (B, 2, Abort(5)), (b"stranger", 3, Abort(5))):
        harness.net.hear(peer, abort, fd)
    assert harness.receive() == [Abort(id, 2)]


def test_only_so_many_messages_are_read_in_a_turn(harness: GatewaysHarness) -> None:
    for id in range(10):
        harness.net.hear(A, submit(id), 1)
    assert [len(harness.receive(max_messages=4)) for _ in range(4)] == [4, 4, 2, 0]


@pytest.mark.parametrize(
    ("claimed", "resumed", "at_least", "at_most"),
    [
        (0.0, False, 0, 0),
        (-0.0, False, 0, 0),
        (7.0, False, -MAX_CLOCK_SKEW, -MAX_CLOCK_SKEW),
        (1e11, False, 0, 0),
        (5e-324, False, -MAX_CLOCK_SKEW, -MAX_CLOCK_SKEW),
        (7.0, True, -MAX_RESUMED_AGE, -MAX_RESUMED_AGE),
        (1e11, True, 0, 0),
    ],
)
def test_a_claimed_arrival_is_kept_within_bounds(
    harness: GatewaysHarness, claimed: float, resumed: bool, at_least: float, at_most: float
) -> None:
    """PRC-26: no gateway's clock puts its requests before or behind all others'."""
    before = time.time()
    harness.net.hear(A, replace(submit(1, arrival=claimed), resumed=resumed), 1)
    (request,) = harness.receive()
    assert isinstance(request, Submit)
    assert before + at_least <= request.arrival <= time.time() + at_most


@pytest.mark.parametrize(("resumed", "age"), [(False, MAX_CLOCK_SKEW / 2), (True, 3600.0)])
def test_an_arrival_just_now_is_kept_and_a_resumed_request_keeps_its_place(
    harness: GatewaysHarness, resumed: bool, age: float
) -> None:
    arrival = time.time() - age
    harness.net.hear(A, replace(submit(1, arrival=arrival), resumed=resumed), 1)
    (request,) = harness.receive()
    assert isinstance(request, Submit)
    assert request.arrival == arrival


def test_what_was_accepted_is_said_once_and_before_its_news(harness: GatewaysHarness) -> None:
    """HTTP-05: all of a turn in one message, under the gateway's own ids."""
    ids = [harness.submit(A, id) for id in (5, 6)]
    harness.deliver([row(ids[0])])
    for id in ids:
        harness.gateways.accept(id)
    assert not harness.gateways.flushed
    assert harness.flush(A) == [Accepted([5, 6]), Progress([row(5)])]
    assert harness.flush(A) == []
    assert harness.gateways.flushed
    assert harness.flush(B) == []


def test_an_acceptance_waits_for_a_gateway_that_is_slow_and_not_for_one_that_is_gone(harness: GatewaysHarness) -> None:
    """HTTP-05: it is lost no more than news are."""
    harness.net.slow.add(A)
    harness.gateways.accept(harness.submit(A, 5))
    assert harness.flush(A) == []
    harness.gateways.accept(harness.submit(A, 6))
    harness.net.slow.clear()
    assert harness.flush(A) == [Accepted([5]), Accepted([6])]
    last = harness.submit(B, 7)
    harness.net.leave(2)
    harness.receive()
    harness.gateways.accept(last)
    assert harness.flush(B) == []


def test_a_submit_out_of_range_is_refused_alone(harness: GatewaysHarness) -> None:
    """PRC-26: the gateway's other requests go on."""
    id = harness.submit(A, 5)
    harness.net.hear(A, msgspec.structs.replace(submit(6), arrival=math.nan), 1)
    assert harness.receive() == []
    harness.deliver([row(id)])
    refused, progress = harness.flush(A)
    assert isinstance(refused, Refused)
    assert (refused.id, refused.reason) == (6, Refusal.INVALID)
    assert progress == Progress([row(5)])


def leave(harness: GatewaysHarness) -> None:
    harness.net.leave(1)
    harness.receive()


def nonsense(harness: GatewaysHarness) -> None:
    harness.net.hear(A, b"nonsense", 1)
    harness.receive()


def silence(harness: GatewaysHarness) -> None:
    harness.beat(B)
    harness.receive(GATEWAY_TIMEOUT + 1)
    harness.gateways.expire(GATEWAY_TIMEOUT + 1)


def unreachable(harness: GatewaysHarness) -> None:
    harness.net.unreachable.add(A)
    harness.gateways.status(STATUS)
    harness.gateways.flush(0.0)


def stuck(harness: GatewaysHarness) -> None:
    harness.net.slow.add(A)
    harness.gateways.status(STATUS)
    harness.gateways.flush(1.0)
    for now in (GATEWAY_TIMEOUT + 1.5, GATEWAY_TIMEOUT + 2):  # two heartbeats tell that it uses no CPU
        for peer in (A, B):
            harness.beat(peer)
        harness.receive(now)
    harness.gateways.expire(GATEWAY_TIMEOUT + 2)


def comes_again(harness: GatewaysHarness) -> None:
    harness.net.hear(A, Hello(VERSION, "a"), 9)
    harness.receive()


def descriptor_reused(harness: GatewaysHarness) -> None:
    harness.net.leave(1)
    harness.net.hear(b"newcomer", Hello(VERSION, "newcomer"), 1)
    harness.receive()
    harness.net.hear(b"newcomer", submit(1), 1)
    assert len(harness.receive()) == 1  # the newcomer stays


@pytest.mark.parametrize("go", [leave, nonsense, silence, unreachable, stuck, comes_again, descriptor_reused])
def test_who_goes_has_its_requests_aborted_and_nobody_else_s(harness: GatewaysHarness, go: object) -> None:
    assert callable(go)
    mine, other = [harness.submit(A, 1), harness.submit(A, 2)], harness.submit(B, 1)
    harness.deliver([row(mine[0])])
    go(harness)
    assert harness.gateways.take_orphans() == [Abort(id) for id in mine]
    assert harness.gateways.take_orphans() == []
    assert other in harness.remembered
    assert not set(mine) & set(harness.remembered)
    harness.deliver([row(mine[1], finish=FinishReason.ABORT)])  # their rows are nobody's now
    harness.net.slow.clear()
    if go is not comes_again:
        harness.net.hear(A, submit(9), 1)
        assert harness.receive() == []  # it has to say Hello first
    harness.deliver([row(other)])
    assert harness.flush(B)[-1] == Progress([row(1)])


def test_one_that_is_heard_is_not_given_up(harness: GatewaysHarness) -> None:
    harness.submit(A, 1)
    for now in (5.0, 14.0, 23.0):
        for peer in (A, B):
            harness.beat(peer)
        harness.receive(now)
        harness.gateways.expire(now)
    harness.net.slow.add(A)
    harness.gateways.status(STATUS)
    harness.gateways.flush(23.0)
    harness.gateways.postpone(100.0)
    harness.gateways.expire(123.0)
    assert harness.gateways.take_orphans() == []


@pytest.mark.parametrize(
    "content", [submit(9), Abort(9), Heartbeat("gateway-a", ProcessStats())], ids=["submit", "abort", "beat"]
)
def test_one_that_was_given_up_is_told_so_whatever_it_says(harness: GatewaysHarness, content: Struct) -> None:
    """PRC-21."""
    harness.gateways.expire(GATEWAY_TIMEOUT + 1.0)
    for peer in (A, b"reporter"):
        harness.net.hear(peer, content, 1)
    harness.net.unreachable.add(B)
    harness.net.hear(B, submit(9), 2)
    assert harness.receive(GATEWAY_TIMEOUT + 2.0) == []
    assert set(harness.flush(A)) == {UnknownGateway()}
    assert harness.flush(B) == []


def test_one_whose_loop_hangs_is_given_up_though_its_reporter_beats(harness: GatewaysHarness) -> None:
    mine, other = harness.submit(A, 1), harness.submit(B, 1)
    given_up = []
    for quarter in range(4 * 12):
        harness.beat(A, ProcessStats(busy_seconds=quarter / 4))
        harness.beat(B)
        harness.receive(quarter / 4)
        harness.gateways.expire(quarter / 4)
        given_up += [(quarter / 4, orphan) for orphan in harness.gateways.take_orphans()]
    assert given_up == [(GATEWAY_TIMEOUT + 0.25, Abort(mine))]
    assert harness.remembered == [other]


def test_one_that_was_short_of_cpu_when_it_was_last_heard_has_longer(harness: GatewaysHarness) -> None:
    id = harness.submit(A, 1)
    for quarter in range(5):
        harness.beat(A, ProcessStats(cpu_wait_seconds=quarter / 4))
        harness.receive(quarter / 4)
    harness.gateways.expire(1.0 + GATEWAY_TIMEOUT + GRACE_PERIOD)
    assert id in harness.remembered
    harness.gateways.expire(1.1 + GATEWAY_TIMEOUT + GRACE_PERIOD)
    assert harness.gateways.take_orphans() == [Abort(id)]


def test_long_messages_end_a_turn(harness: GatewaysHarness) -> None:
    """PRC-28."""
    for id in range(4):
        harness.net.hear(A, submit(id, [5] * (MAX_TURN_BYTES // 8 + 1)), 1)  # half of a turn's bytes each
    assert [len(harness.receive()) for _ in range(3)] == [2, 2, 0]


def test_a_message_from_a_connection_that_has_ended_makes_no_gateway(harness: GatewaysHarness) -> None:
    harness.net.hear(b"late", Hello(VERSION, "late"), 5)
    harness.net.leave(5)
    harness.receive()
    harness.gateways.status(STATUS)
    assert harness.flush(b"late") == []


def test_what_a_slow_gateway_cannot_take_waits_and_is_merged(harness: GatewaysHarness) -> None:
    id = harness.submit(A, 5)
    harness.net.slow.add(A)
    for position in range(100):
        harness.deliver([row(id, position=position)])
        harness.gateways.status(STATUS)
        assert harness.flush(A) == []
    assert not harness.gateways.flushed
    harness.net.slow.clear()
    messages = harness.flush(A, 2.0)
    positions = [one.position for message in messages if isinstance(message, Progress) for one in message.rows]
    assert positions == list(range(100))
    assert len(messages) <= 3  # what was stuck first (news and a status), and all the rest
    assert harness.gateways.flushed
    harness.gateways.expire(2.0 + GATEWAY_TIMEOUT / 2)
    assert harness.remembered == [id]


def test_messages_stay_far_below_the_limit_of_a_frame(harness: GatewaysHarness) -> None:
    id = harness.submit(A, 5)
    harness.deliver([row(id, position=position) for position in range(MAX_ROWS + 1)])
    assert [len(message.rows) for message in harness.flush(A) if isinstance(message, Progress)] == [MAX_ROWS, 1]


def test_hello_is_answered_when_there_is_something_to_say(harness: GatewaysHarness) -> None:
    assert harness.flush(A) == []
    harness.gateways.welcome(WELCOME)
    assert harness.flush(A) == harness.flush(B) == [WELCOME]
    harness.net.hear(b"late", Hello(VERSION, "late"), 5)
    harness.receive()
    assert harness.flush(b"late") == [WELCOME]
    again = Welcome(VERSION, "0", "boot", ModelInfo("m", "Llama", "float32", 1000, 100, "g"), 50, 8)
    harness.gateways.welcome(again)
    assert harness.flush(A) == [again]


def test_another_version_is_not_served(harness: GatewaysHarness) -> None:
    harness.gateways.welcome(WELCOME)
    harness.net.hear(b"old", Hello(VERSION - 1, "old"), 5)
    harness.net.hear(b"old", submit(1), 5)
    assert harness.receive() == []
    harness.gateways.status(STATUS)
    assert harness.flush(b"old") == [UnknownGateway()]


def test_a_late_hello_of_one_that_has_left_harms_nobody(harness: GatewaysHarness) -> None:
    """It was read late, and its descriptor is that of gateway A by now."""
    harness.submit(A, 5)
    harness.net.unreachable.add(b"left")
    harness.net.hear(b"left", Hello(VERSION, "left"), 1)
    harness.receive()
    assert harness.gateways.take_orphans() == []
    assert b"left" not in harness.gateways._gateways
    assert harness.net.dropped == {DropReason.UNKNOWN_SENDER: 1}


def test_a_flood_of_newcomers_is_bounded(harness: GatewaysHarness, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "MAX_GATEWAYS", 5)
    id = harness.submit(A, 5)
    for number in range(10):
        harness.net.hear(b"%d" % number, Hello(VERSION, "x"), 10 + number)
    harness.net.hear(A, Abort(5), 1)
    assert harness.receive() == [Abort(id, -1)]
    assert len(harness.gateways._gateways) == 5
    assert harness.net.dropped == {DropReason.NOT_ADMITTED: 7}
    harness.net.leave(10)
    harness.net.hear(b"9", Hello(VERSION, "x"), 19)
    harness.receive()
    assert b"9" in harness.gateways._gateways


def test_what_is_dropped_is_counted_by_its_reason(harness: GatewaysHarness) -> None:
    for content in (b"\xc1", b"", Abort(77)):
        harness.net.hear(A, content, 1)
    harness.net.hear(b"nobody", Abort(1), 3)
    harness.net.hear(b"nobody", Heartbeat("nobody", ProcessStats()), 3)
    harness.net.hear(b"old", Hello(VERSION + 1, "old"), 4)
    harness.receive()
    harness.receive()
    assert harness.net.dropped == {
        DropReason.MALFORMED: 2,
        DropReason.UNKNOWN_SENDER: 3,  # of A, which was given up, the abort too
        DropReason.NOT_ADMITTED: 1,
    }


def test_a_reset_is_confirmed_to_the_gateway_that_asked(harness: GatewaysHarness) -> None:
    harness.net.hear(A, ResetPrefixCache(7), 1)
    harness.net.hear(B, ResetPrefixCache(7), 2)
    first, second = harness.receive()
    assert isinstance(first, Reset)
    assert isinstance(second, Reset)
    harness.gateways.confirm(second)
    assert (harness.flush(A), harness.flush(B)) == ([], [PrefixCacheReset(7)])
    harness.gateways.confirm(first)
    assert harness.flush(A) == [PrefixCacheReset(7)]
