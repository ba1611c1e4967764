"""Tests of `EngineRequest`: which rows reach the reader, and what ends a request."""

import asyncio

import pytest

from services.gateway.engine_request import EngineRequest
from shared.errors import EngineFailure, Overloaded, QuireError
from shared.protocol import Abort, FinishReason, ProgressRow


class EngineRequestHarness:
    def __init__(self, n: int = 1) -> None:
        self.sent: list[Abort] = []
        self.request = EngineRequest(5, n, "0", self.sent.append)

    def take(self, position: int, *tokens: int, sample: int = 0, finish: FinishReason | None = None) -> None:
        self.request.add(ProgressRow(5, sample, position, list(tokens), finish_reason=finish))

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
    harness.take(1, finish=FinishReason.ABORT)
    assert [row.finish_reason for row in await harness.request.rows()] == [None, FinishReason.ABORT]
