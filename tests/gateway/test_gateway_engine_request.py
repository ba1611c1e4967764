"""Tests of `EngineRequest`: which rows reach the reader, what ends a request, and what is submitted again."""

import asyncio
import itertools
from array import array
from typing import Any

import pytest
from msgspec.structs import replace

from services.gateway.engine_request import MAX_LOSSES, EngineRequest, Interruption
from shared.errors import EngineFailure, Overloaded, QuireError
from shared.protocol import (
    Abort,
    FinishReason,
    ProgressRow,
    Sampling,
    SchedulingInfo,
    TokenLogprobs,
    pack_tokens,
)

PROMPT = array("i", [1, 2, 3])


class FakeEngine:
    """An engine that notes what is aborted there."""

    def __init__(self, name: str = "0") -> None:
        self.name = name
        self.aborted: list[Abort] = []

    def abort(self, id: int, sample: int = -1) -> None:
        self.aborted.append(Abort(id, sample))


class EngineRequestHarness:
    """A request that was placed at one engine, with id 5."""

    def __init__(self, n: int = 1, **params: Any) -> None:
        self.engine = FakeEngine()
        self.ids = itertools.count(5)
        self.unplaced: list[list[int]] = []
        self.now = 100.0
        self.request = EngineRequest(
            PROMPT,
            Sampling(max_tokens=9, seed=4, **params),
            n=n,
            priority=2,
            samples_before=7,
            on_unplaced=lambda request: self.unplaced.append(request.unplaced),
            clock=lambda: self.now,
        )
        self.submits = self.request.place(self.engine, self.ids)

    @property
    def sent(self) -> list[Abort]:
        return self.engine.aborted

    def take(self, position: int, *tokens: int, sample: int = 0, finish: FinishReason | None = None) -> None:
        self.request.add(ProgressRow(5, sample, position, list(tokens), finish_reason=finish))
        self.request.deliver()

    async def tokens(self) -> list[int]:
        return [token for row in await self.request.rows() for token in row.tokens]


async def test_rows_come_in_order_and_waiting_is_for_news_only() -> None:
    harness = EngineRequestHarness()
    harness.take(0, 7)
    harness.take(1, 8, 9)
    assert await harness.tokens() == [7, 8, 9]
    waiting = asyncio.create_task(harness.tokens())
    await asyncio.sleep(0)
    assert not waiting.done()
    harness.take(3, 10, finish=FinishReason.STOP)
    assert await waiting == [10]
    assert harness.request.done


async def test_who_follows_gets_rows_at_once_until_there_are_enough() -> None:
    """No turn of the event loop is needed, and what comes between two deliveries comes together."""
    harness, taken = EngineRequestHarness(), []
    harness.take(0, 7)

    def take(rows: list[ProgressRow]) -> bool:
        taken.append([token for row in rows for token in row.tokens])
        return len(taken) < 3

    following = asyncio.create_task(harness.request.follow(take))
    await asyncio.sleep(0)
    assert taken == [[7]]
    harness.take(1, 8)
    assert taken == [[7], [8]]
    harness.request.deliver()
    harness.request.add(ProgressRow(5, 0, 2, [9]))
    harness.take(3, 10)
    assert taken == [[7], [8], [9, 10]]
    harness.take(4, 11)
    await following
    assert len(taken) == 3
    assert await harness.tokens() == [11]


async def test_who_follows_gets_the_error_behind_the_rows() -> None:
    harness, taken = EngineRequestHarness(), []
    following = asyncio.create_task(harness.request.follow(lambda rows: taken.append(rows) is None))
    await asyncio.sleep(0)
    harness.request.add(ProgressRow(5, 0, 0, [7]))
    harness.request.fail(EngineFailure("out of luck"))
    assert [row.tokens for rows in taken for row in rows] == [[7]]
    with pytest.raises(EngineFailure, match="out of luck"):
        await following


@pytest.mark.parametrize("fails", [True, False], ids=["its function fails", "it is cancelled"])
async def test_who_stops_following_gets_nothing_more(fails: bool) -> None:
    """What goes wrong with one stream is raised in its own task, and the reader of the socket goes on."""
    harness, taken = EngineRequestHarness(), []

    def take(rows: list[ProgressRow]) -> bool:
        taken.append(rows)
        if fails:
            raise ConnectionResetError
        return True

    following = asyncio.create_task(harness.request.follow(take))
    await asyncio.sleep(0)
    harness.take(0, 7)
    if not fails:
        following.cancel()
    with pytest.raises(ConnectionResetError if fails else asyncio.CancelledError):
        await following
    harness.take(1, 8)
    assert len(taken) == 1


async def test_an_acceptance_is_the_engines_word_or_its_first_row_and_no_news_of_the_stream() -> None:
    """HTTP-05: an acceptance does not wake a reader of rows."""
    by_word, by_row = EngineRequestHarness(), EngineRequestHarness()
    accepted = [asyncio.create_task(harness.request.wait_accepted()) for harness in (by_word, by_row)]
    await asyncio.sleep(0)
    assert not any(task.done() for task in accepted)
    by_word.request.accept()
    by_row.take(0, 7)
    await asyncio.gather(*accepted)
    assert await by_row.tokens() == [7]
    rows = asyncio.create_task(by_word.tokens())
    await asyncio.sleep(0)
    by_word.request.accept()
    await asyncio.sleep(0)
    assert not rows.done()
    by_word.take(0, 8)
    assert await rows == [8]


@pytest.mark.parametrize("error", [Overloaded("full", 3.0), EngineFailure("the engine was lost")])
async def test_a_refusal_and_a_failure_end_the_wait_for_an_acceptance(error: QuireError) -> None:
    """HTTP-05: the refusal or the engine's failure is raised."""
    harness = EngineRequestHarness()
    waiting = asyncio.create_task(harness.request.wait_accepted())
    await asyncio.sleep(0)
    harness.request.fail(error)
    with pytest.raises(type(error), match=str(error)):
        await waiting
    with pytest.raises(type(error)):
        await harness.request.wait_accepted()


async def test_what_is_there_already_is_not_applied_again() -> None:
    harness = EngineRequestHarness()
    harness.take(0, 7)
    harness.take(0, 7)
    harness.take(1, 8)
    harness.take(0, 7, 8)
    assert await harness.tokens() == [7, 8]


async def test_a_gap_fails_the_request_and_ends_it_at_the_engine() -> None:
    harness = EngineRequestHarness()
    harness.take(0, 7)
    harness.take(3, 10)
    harness.take(1, 8)
    assert await harness.tokens() == [7]
    with pytest.raises(EngineFailure, match="tokens 1 to 2 of the output were lost"):
        await harness.tokens()
    assert harness.sent == [Abort(5)]


async def test_more_tokens_than_it_asked_for_fail_the_request_and_end_it_at_the_engine() -> None:
    harness = EngineRequestHarness()
    harness.take(0, *range(9))
    harness.take(9, 1)
    assert await harness.tokens() == list(range(9))
    with pytest.raises(EngineFailure, match="more than the 9 tokens"):
        await harness.request.rows()
    assert harness.sent == [Abort(5)]


async def test_samples_have_positions_of_their_own() -> None:
    harness = EngineRequestHarness(2)
    harness.take(0, 7, sample=1)
    harness.take(0, 8, sample=0)
    harness.take(1, 9, sample=1, finish=FinishReason.LENGTH)
    harness.take(0, 1, sample=2)
    assert [(row.sample, row.tokens) for row in await harness.request.rows()] == [(1, [7]), (0, [8]), (1, [9])]
    assert not harness.request.done


async def test_an_aborted_sample_is_heard_of_no_more() -> None:
    harness = EngineRequestHarness(2)
    harness.take(0, 7, sample=0)
    harness.take(0, 8, sample=1)
    harness.request.abort(0)
    harness.request.abort(0)
    harness.take(1, 9, sample=0, finish=FinishReason.ABORT)
    harness.take(1, 10, sample=1, finish=FinishReason.STOP)
    assert harness.sent == [Abort(5, 0)]
    assert await harness.tokens() == [8, 10]
    harness.request.abort(1)
    assert harness.sent == [Abort(5, 0)]


async def test_an_error_comes_after_the_rows_before_it_and_stays() -> None:
    harness = EngineRequestHarness()
    harness.take(0, 7)
    harness.request.fail(Overloaded("full", 2.0))
    harness.request.fail(EngineFailure("later"))
    harness.take(1, 8)
    assert await harness.tokens() == [7]
    for _ in range(2):
        with pytest.raises(Overloaded):
            await harness.tokens()


async def test_what_has_ended_does_not_fail_any_more_and_must_not_be_waited_for() -> None:
    harness = EngineRequestHarness()
    harness.take(0, 7, finish=FinishReason.STOP)
    harness.request.fail(EngineFailure("later"))
    assert await harness.tokens() == [7]
    with pytest.raises(RuntimeError, match="has ended"):
        await harness.tokens()


async def test_a_last_row_needs_no_tokens() -> None:
    harness = EngineRequestHarness()
    harness.take(0, 7)
    harness.take(1, finish=FinishReason.ERROR)
    assert [row.finish_reason for row in await harness.request.rows()] == [None, FinishReason.ERROR]


async def test_a_request_goes_on_where_it_was() -> None:
    """The other engine gets the output so far, and rows of both are one stream. Late rows change nothing."""
    harness = EngineRequestHarness()
    (first,) = harness.submits
    assert (first.tokens, first.n, first.resumed) == (pack_tokens(PROMPT), 1, False)
    harness.request.accept()
    harness.take(0, 7, 8)
    other = FakeEngine("1")
    harness.request.lose(harness.engine)
    assert harness.unplaced == [[0]]
    (second,) = harness.request.place(other, harness.ids)
    assert second == replace(first, id=6, tokens=pack_tokens([*PROMPT, 7, 8]), resumed=True)
    harness.take(1, 8)
    harness.take(2, 9, finish=FinishReason.LENGTH)
    assert await harness.tokens() == [7, 8, 9]
    assert harness.request.done
    assert harness.request.engine == "1"


async def test_each_unfinished_sample_is_submitted_by_itself_once_there_is_output() -> None:
    harness = EngineRequestHarness(4)
    assert [(submit.sample, submit.n) for submit in harness.submits] == [(0, 4)]
    harness.take(0, 7, sample=0)
    harness.take(0, 8, sample=1, finish=FinishReason.STOP)
    harness.request.abort(2)
    harness.request.lose(harness.engine)
    submits = harness.request.place(FakeEngine(), harness.ids)
    assert [(one.id, one.sample, one.n, one.tokens) for one in submits] == [
        (6, 0, 1, pack_tokens([*PROMPT, 7])),
        (7, 3, 1, pack_tokens(PROMPT)),
    ]
    assert all(submit.sampling.seed == 4 and submit.samples_before == 7 for submit in submits)


async def test_a_request_without_output_is_submitted_whole() -> None:
    harness = EngineRequestHarness(3)
    harness.request.lose(harness.engine)
    (submit,) = harness.request.place(FakeEngine(), harness.ids)
    assert submit == replace(harness.submits[0], id=6)
    assert not submit.resumed, "no engine has accepted it yet, so it may be refused for load"


async def test_what_has_ended_is_not_submitted_again() -> None:
    harness = EngineRequestHarness(2)
    harness.take(0, 7, sample=0, finish=FinishReason.STOP)
    harness.request.abort(1)
    harness.request.lose(harness.engine)
    assert harness.unplaced == []
    failed = EngineRequestHarness()
    failed.request.fail(EngineFailure("poison"))
    failed.request.lose(failed.engine)
    assert failed.unplaced == []


async def test_an_engine_that_ends_hands_its_samples_back() -> None:
    harness = EngineRequestHarness(2)
    harness.take(0, 7, sample=1)
    harness.take(1, sample=1, finish=FinishReason.ABORT)
    assert harness.unplaced == [[1]]
    (submit,) = harness.request.place(FakeEngine(), harness.ids)
    assert (submit.sample, submit.tokens) == (1, pack_tokens([*PROMPT, 7]))
    harness.take(0, 9, sample=0)
    assert await harness.tokens() == [7, 9]


async def test_an_engine_that_takes_nothing_is_no_end() -> None:
    harness = EngineRequestHarness()
    harness.request.reject(harness.engine, 5)
    assert harness.unplaced == [[0]]
    assert not harness.request.done


async def test_an_aborted_sample_is_aborted_where_it_runs_now() -> None:
    harness = EngineRequestHarness(2)
    harness.take(0, 7)
    harness.request.lose(harness.engine)
    other = FakeEngine()
    harness.request.place(other, harness.ids)
    harness.request.abort(1)
    assert (harness.sent, other.aborted) == ([], [Abort(7, 1)])


async def test_prompt_log_probabilities_come_once() -> None:
    """Those that came before the loss are left out, and a request that has all asks for none."""

    def scores(*ranks: int) -> list[TokenLogprobs]:
        return [TokenLogprobs(-1.0, rank, [], []) for rank in ranks]

    harness = EngineRequestHarness(prompt_logprobs=0)
    harness.request.add(ProgressRow(5, 0, 0, [], None, scores(1)))
    harness.request.lose(harness.engine)
    (submit,) = harness.request.place(harness.engine, harness.ids)
    assert submit.sampling.prompt_logprobs == 0
    harness.request.add(ProgressRow(6, 0, 0, [7], None, scores(1, 2)))
    assert [row.prompt_logprobs for row in await harness.request.rows()] == [scores(1), scores(2)]
    harness.request.lose(harness.engine)
    (submit,) = harness.request.place(harness.engine, harness.ids)
    assert submit.sampling.prompt_logprobs == -1


async def test_what_another_sample_loses_hides_no_prompt_log_probabilities() -> None:
    """Sample 0 goes on where it is while sample 1 is submitted again."""
    harness = EngineRequestHarness(2, prompt_logprobs=0)
    first, second = (TokenLogprobs(-1.0, rank, [], []) for rank in (1, 2))
    harness.request.add(ProgressRow(5, 0, 0, [7], None, [first]))
    harness.request.lose(harness.engine)
    harness.request.place(harness.engine, harness.ids)
    harness.request.add(ProgressRow(6, 0, 1, [8], None, [first]))
    harness.request.reject(harness.engine, 7)
    harness.request.place(harness.engine, harness.ids)
    harness.request.add(ProgressRow(6, 0, 2, [9], None, [second]))
    assert [row.prompt_logprobs for row in await harness.request.rows()] == [[first], None, [second]]


async def test_usage_and_times_go_on() -> None:
    """Cached tokens and the wait are those of the first engine, and preemptions are those of all."""
    harness = EngineRequestHarness()
    harness.request.add(ProgressRow(5, 0, 0, [7], cached_tokens=2, scheduling=SchedulingInfo(0.5, 1)))
    harness.request.lose(harness.engine)
    harness.request.place(harness.engine, harness.ids)
    harness.request.add(ProgressRow(6, 0, 1, [8], cached_tokens=0, scheduling=SchedulingInfo(9.0, 0)))
    harness.request.add(ProgressRow(6, 0, 2, [9], cached_tokens=0, scheduling=SchedulingInfo(9.0, 1)))
    rows = await harness.request.rows()
    assert [row.cached_tokens for row in rows] == [2, 2, 2]
    assert [row.scheduling for row in rows] == [SchedulingInfo(0.5, 1), None, SchedulingInfo(0.5, 2)]


async def test_a_wait_for_an_engine_counts_as_time_in_the_queue_until_the_first_admission() -> None:
    """API-04: as if one engine had had the request from its beginning."""
    harness = EngineRequestHarness(2)
    harness.now = 103.0
    harness.request.lose(harness.engine)  # before it was admitted anywhere
    harness.now = 107.0
    harness.request.place(harness.engine, harness.ids)
    harness.request.add(ProgressRow(6, 0, 0, [7], scheduling=SchedulingInfo(2.0, 0)))
    harness.now = 110.0
    harness.request.lose(harness.engine)
    harness.now = 120.0
    harness.request.place(harness.engine, harness.ids)
    harness.request.add(ProgressRow(7, 0, 1, [8], scheduling=SchedulingInfo(1.0, 0)))
    harness.request.add(ProgressRow(8, 1, 0, [9], scheduling=SchedulingInfo(1.0, 0)))
    rows = [(row.sample, row.scheduling) for row in await harness.request.rows()]
    assert rows == [(0, SchedulingInfo(9.0, 0)), (0, None), (1, SchedulingInfo(21.0, 0))]


async def test_an_interruption_lasts_from_the_loss_to_the_first_new_token() -> None:
    harness = EngineRequestHarness(2)
    harness.take(0, 7)
    harness.take(0, 9, sample=1, finish=FinishReason.STOP)
    harness.now = 103.0
    harness.request.lose(harness.engine, "it is silent")
    assert harness.request.interruptions == [Interruption("0", "it is silent", [0], 103.0)]
    harness.now = 104.0
    other = FakeEngine("1")
    harness.request.place(other, harness.ids)
    harness.now = 105.0
    harness.take(0, 7)  # has come before
    assert harness.request.interruptions == [Interruption("0", "it is silent", [0], 103.0, 104.0, "1")]
    harness.take(1, 8)
    harness.now = 106.0
    harness.take(2, 9)
    assert harness.request.interruptions == [Interruption("0", "it is silent", [0], 103.0, 104.0, "1", 105.0)]


async def test_an_engine_lost_during_a_recovery_is_another_interruption() -> None:
    harness = EngineRequestHarness()
    harness.request.accept()
    engines = [harness.engine, FakeEngine("1"), FakeEngine("2")]
    for former, following in itertools.pairwise(engines):
        harness.now += 1.0
        harness.request.lose(former)
        harness.now += 1.0
        harness.request.place(following, harness.ids)
    harness.now = 110.0
    harness.take(0, 7)
    bounds = [(one.engine, one.began, one.placed, one.ended) for one in harness.request.interruptions]
    assert bounds == [("0", 101.0, 102.0, 110.0), ("1", 103.0, 104.0, 110.0)]
    assert harness.request.recoveries == harness.request.interruptions


async def test_what_another_sample_says_ends_no_interruption_and_neither_does_a_row_without_tokens() -> None:
    harness = EngineRequestHarness(2, prompt_logprobs=0)
    engines = [FakeEngine("1"), FakeEngine("2")]
    harness.take(0, 7)
    harness.take(0, 8, sample=1)
    harness.request.lose(harness.engine)
    harness.request.place(engines[0], harness.ids)
    harness.request.reject(engines[0], 7)  # that of sample 1
    harness.request.place(engines[1], harness.ids)
    harness.take(1, 9)
    harness.take(1, 9, sample=1)
    harness.request.lose(engines[1])
    harness.request.place(engines[1], harness.ids)
    harness.take(2, 10)
    harness.request.add(ProgressRow(8, 1, 2, [], prompt_logprobs=[TokenLogprobs(-1.0, 1, [], [])]))
    first, second = harness.request.interruptions
    assert (first.samples, first.ended, second.samples, second.ended) == ([0, 1], 100.0, [1], None)
    harness.take(2, 10, sample=1)
    assert second.ended == 100.0


async def test_samples_that_an_ending_engine_gives_back_one_by_one_are_one_interruption() -> None:
    harness = EngineRequestHarness(2)
    harness.take(0, 7)
    for sample in range(2):
        harness.take(0, sample=sample, finish=FinishReason.ABORT)
    assert harness.request.interruptions == [Interruption("0", "it has ended", [0, 1], 100.0)]


async def test_what_no_engine_has_accepted_is_not_interrupted() -> None:
    harness = EngineRequestHarness()
    harness.request.lose(harness.engine)
    harness.request.place(harness.engine, harness.ids)
    harness.request.accept()
    harness.request.reject(harness.engine, 6)
    assert harness.request.interruptions == []


@pytest.mark.parametrize("accepted", [True, False])
async def test_a_request_that_loses_engine_after_engine_fails(accepted: bool) -> None:
    """It may be what ends them. Also an engine that accepts it may be ended by it, in its first step."""
    harness = EngineRequestHarness(2)
    for _ in range(MAX_LOSSES):
        assert not harness.request.done
        if accepted:
            harness.request.accept()
        harness.request.lose(harness.engine, "its connection ended")
        harness.request.place(harness.engine, harness.ids)
    with pytest.raises(
        EngineFailure, match="5 engines in a row were lost with it, the last one because its connection"
    ):
        await harness.request.rows()


async def test_output_and_drains_do_not_count_towards_the_losses_that_fail_a_request() -> None:
    harness = EngineRequestHarness()
    for position in range(4):
        for _ in range(MAX_LOSSES - 1):
            harness.request.lose(harness.engine)
            harness.request.place(harness.engine, harness.ids)
            harness.take(position - 1, *[7] * (position > 0))  # has come before
            harness.request.accept()
        harness.take(position, 7)
    for _ in range(2 * MAX_LOSSES):
        harness.request.leave(harness.engine, "it drains")
        harness.request.place(harness.engine, harness.ids)
    assert not harness.request.done
    assert await harness.tokens() == [7] * 4


async def test_a_refusal_after_an_acceptance_is_a_failure() -> None:
    """The client may have had output, or a status, so it is too late to refuse."""
    refused, accepted = EngineRequestHarness(), EngineRequestHarness()
    accepted.request.accept()
    for harness in (refused, accepted):
        harness.request.refuse(Overloaded("the queue is full", 1.0))
    with pytest.raises(Overloaded, match=r"^the queue is full$"):
        await refused.request.rows()
    with pytest.raises(EngineFailure, match=r"^the engine was lost, and the queue is full$"):
        await accepted.request.rows()


async def test_a_refusal_concerns_the_engine_that_refuses() -> None:
    """Ids are counted by each connection, so two engines may have an attempt of the same id."""
    harness = EngineRequestHarness(2)
    harness.take(0, 7, sample=1)
    harness.take(1, sample=1, finish=FinishReason.ABORT)
    other = FakeEngine("1")
    (submit,) = harness.request.place(other, itertools.count(5))
    assert (submit.id, submit.sample) == (5, 1)
    harness.request.reject(other, 5)
    assert harness.unplaced[-1] == [1]
    assert [attempt.samples for attempt in harness.request.attempts_at(harness.engine)] == [{0}]


async def test_the_first_token_of_any_sample_is_reported_once() -> None:
    lengths: list[list[int]] = []
    request = EngineRequest(
        PROMPT,
        Sampling(max_tokens=9, seed=4),
        n=2,
        on_first_token=lambda request: lengths.append([len(output) for output in request.outputs]),
    )
    request.place(FakeEngine(), itertools.count(5))
    for sample, position, tokens in ((1, 0, []), (1, 0, [7]), (0, 0, [8]), (1, 1, [9])):
        request.add(ProgressRow(5, sample, position, tokens))
    assert lengths == [[0, 1]]
