"""A whole scheduler, without sockets, against peers that put an odd value into one field of a message.

Whatever the value is, the scheduler's loop goes on, and another gateway is served by another worker afterwards.
"""

import itertools
import logging
import random
import time
from typing import Any

import msgspec
import pytest

from services.scheduler.config import MAX_BLOCKS
from services.scheduler.registration import MAX_MEMORY
from shared.errors import ConfigError
from shared.protocol import (
    VERSION,
    Abort,
    Configure,
    Configured,
    Fault,
    Heartbeat,
    Hello,
    ProcessStats,
    Progress,
    Refused,
    Register,
    SampledRow,
    Sampling,
    StepPlan,
    StepResult,
    Stop,
    Submit,
    TokenLogprobs,
    decode_from_gateway,
    decode_from_worker,
    decode_to_gateway,
    encode,
    pack_tokens,
)
from tests.scheduler.examples import MODEL, REGISTER
from tests.scheduler.scheduler_harness import BAD, SPARE, WORKER, SchedulerHarness
from tests.shared.invalid_messages import FLOATS, INTEGERS, ODD, STRINGS, changed, leaves

HOSTILE: tuple[Any, ...] = (*FLOATS, *INTEGERS, *STRINGS, *ODD)
SAMPLING = Sampling(4, 7, 0.5, 0.9, 4, 0.1, 0.1, 0.1, 1.1, [(7, 1.0)], 1, [9], 1, 0)
SCORES = [TokenLogprobs(-0.5, 2, [4], [-0.25])]


def running() -> tuple[SchedulerHarness, int, int, list[StepPlan]]:
    """A scheduler in which the bad gateway has a request running; its connection, the worker's, and the plans."""
    harness = SchedulerHarness()
    gateway, worker = harness.connect(BAD), harness.register(WORKER)
    harness.configured(WORKER, worker)
    harness.gateways.hear(BAD, Submit(1, pack_tokens([1, 2, 3]), 3, SAMPLING), gateway)
    harness.turn()
    return harness, gateway, worker, [plan for plan in harness.sent_to(WORKER) if isinstance(plan, StepPlan)]


SUBMIT = Submit(2, pack_tokens([1, 2, 70]), 3, SAMPLING, 2, 0, 0, 1.5)
FROM_GATEWAY = (Hello(VERSION, "bad"), SUBMIT, Abort(1, 0), Heartbeat("bad", ProcessStats()))


@pytest.mark.parametrize("message", FROM_GATEWAY, ids=lambda message: type(message).__name__)
def test_no_value_of_a_gateway_ends_the_scheduler(message: Any) -> None:
    """PRC-26: a message is served or refused, and anything else costs its sender at most its connection."""
    whole = encode(message)
    harness, *_ = running()
    for path, _ in leaves(msgspec.msgpack.decode(whole)):
        for value in HOSTILE:
            gateway = harness.connect(BAD)
            harness.gateways.hear(BAD, changed(whole, path, value), gateway)
            harness.turn(1)
            harness.gateways.hear(BAD, encode(SUBMIT), gateway)  # something to be put in order with it
            harness.gateways.hear(BAD, encode(Abort(2)), gateway)
            harness.turn(1)
    assert harness.serves()


def results(plan: StepPlan) -> list[msgspec.Struct]:
    rows = [SampledRow(row.slot, [5], SCORES, SCORES * (row.count - 1)) for row in plan.rows]
    return [
        StepResult(plan.epoch, plan.step, rows, 0.01),
        Fault(plan.epoch, plan.step, "why"),
        Heartbeat(WORKER.decode(), ProcessStats()),
        Configured(plan.epoch),
    ]


@pytest.mark.parametrize("kind", range(4), ids=["StepResult", "Fault", "Heartbeat", "Configured"])
def test_no_value_of_a_worker_ends_the_scheduler(kind: int) -> None:
    """PRC-26: a worker that sends an impossible value is given up, and its requests go on elsewhere."""
    *_, plans = running()
    paths = [path for path, _ in leaves(msgspec.msgpack.decode(encode(results(plans[0])[kind])))]
    for path, value in itertools.product(paths, HOSTILE):
        harness, _, worker, (plan, *_) = running()
        harness.workers.hear(WORKER, changed(encode(results(plan)[kind]), path, value), worker)
        harness.turn()
    assert harness.serves()


def test_no_figure_of_a_worker_ends_the_scheduler() -> None:
    """PRC-27: of the first worker or a later one. Only too little memory in the first is an error of the settings."""
    whole = encode(REGISTER)
    later, *_ = running()
    for path, _ in leaves(msgspec.msgpack.decode(whole)):
        for value in HOSTILE:
            body = changed(whole, path, value)
            first, fd = SchedulerHarness(), 5
            first.workers.hear(WORKER, body, fd)
            try:
                first.turn()
            except ConfigError:
                register = decode_from_worker(body)
                assert isinstance(register, Register)
                assert register.kv_memory < register.kv_bytes_per_token * 16, "not one block"
                continue
            for message in first.sent_to(WORKER):
                assert isinstance(message, Stop) or message.num_blocks <= MAX_BLOCKS
            later.workers.hear(SPARE, body, fd)
            later.turn(1)
            later.workers.leave(fd)
    assert later.serves()


TOO_SMALL = msgspec.structs.replace(REGISTER, kv_memory=160 * 49)


def test_a_spare_worker_with_less_memory_is_dismissed_and_the_next_one_is_taken(
    caplog: pytest.LogCaptureFixture,
) -> None:
    """PRC-27: it could not hold what was promised, which is no reason for the scheduler to end."""
    harness = SchedulerHarness(max_model_len=800)
    first = harness.register(WORKER)
    harness.register(b"small", TOO_SMALL)
    harness.workers.leave(first)
    harness.turn()
    assert [type(message) for message in harness.sent_to(b"small")] == [Stop]
    assert "its memory holds 784 tokens, but requests of 800" in caplog.text
    assert harness.serves()


ABSURD: list[dict[str, Any]] = [
    {"kv_memory": 2**62},
    {"kv_memory": MAX_MEMORY + 1, "kv_bytes_per_token": 1},
    {"kv_bytes_per_token": 2**62},
    {"kv_bytes_per_token": 0},
    {"step_seconds": 1e9},
    {"token_seconds": 1e6},
    {"step_seconds": float("nan")},
    {"step_seconds": -1.0},
    {"token_seconds": float("inf")},
    {"model": msgspec.structs.replace(MODEL, max_positions=0)},
    {"model": msgspec.structs.replace(MODEL, vocab_size=2**40)},
]


@pytest.mark.parametrize("figures", ABSURD, ids=str)
@pytest.mark.parametrize("is_first", [True, False])
def test_figures_beyond_reason_are_refused_at_once(
    figures: dict[str, Any], is_first: bool, caplog: pytest.LogCaptureFixture
) -> None:
    """PRC-27: the worker is told to end, with a line in the log, and the next one is waited for."""
    harness = SchedulerHarness()
    if not is_first:
        harness.register(WORKER)
    with caplog.at_level(logging.WARNING):
        harness.register(b"absurd", msgspec.structs.replace(REGISTER, **figures))
    assert [type(message) for message in harness.sent_to(b"absurd")] == [Stop]
    assert "absurd" in caplog.text
    assert harness.serves()


def test_a_token_of_one_byte_makes_no_table_of_gigabytes() -> None:
    """PRC-27: a pool has no more blocks than can be of use."""
    harness = SchedulerHarness()
    harness.register(WORKER, msgspec.structs.replace(REGISTER, kv_memory=2**40, kv_bytes_per_token=1))
    (configure,) = harness.sent_to(WORKER)
    assert isinstance(configure, Configure)
    assert configure.num_blocks == MAX_BLOCKS


def test_a_gateway_with_a_wrong_clock_is_neither_first_nor_last() -> None:
    """PRC-26: arrivals far in the past or the future are taken for now, or for a little earlier."""
    harness = SchedulerHarness(max_num_seqs=1, max_num_batched_tokens=4)
    gateway, worker = harness.connect(BAD), harness.register(WORKER)
    harness.configured(WORKER, worker)
    harness.turn()
    chance = random.Random(26)
    arrivals = [0.0, 1.0, 5e-324, 1e11, time.time() + 3600, time.time() - 3600]
    chance.shuffle(arrivals)
    for id, arrival in enumerate(arrivals):
        harness.gateways.hear(BAD, Submit(id, pack_tokens([1]), 1, Sampling(1, 0), arrival=arrival), gateway)
    before = time.time()
    harness.turn(1)
    assert harness.service.engine is not None
    core = harness.service.engine._core
    waiting = [sequence.request.order_key[1] for sequence in core._queues.waiting.items]
    assert len(waiting) == len(arrivals) - 1
    assert all(before - 11 < arrival <= time.time() for arrival in waiting)


def test_a_submit_out_of_range_does_not_cost_its_gateway_the_others() -> None:
    """PRC-26: it is refused by its id; the request before it goes on."""
    harness, gateway, worker, (plan, *_) = running()
    body = changed(encode(SUBMIT), (8,), float("nan"))
    with pytest.raises(Exception, match="not a message"):
        decode_from_gateway(body)
    harness.gateways.hear(BAD, body, gateway)
    harness.turn()
    harness.workers.hear(WORKER, results(plan)[0], worker)
    harness.turn()
    messages = harness.gateways.take(BAD, decode_to_gateway)
    assert [message.id for message in messages if isinstance(message, Refused)] == [2]
    assert [row.tokens for message in messages if isinstance(message, Progress) for row in message.rows] == [[5]]
