"""Tests of `EngineRequest`: which rows reach the reader, and what ends a request."""

import asyncio

import pytest

from services.gateway.engine_request import EngineRequest
from shared.errors import EngineFailure, Overloaded, QuireError
from shared.protocol import Abort, FinishReason, ProgressRow


class World:
    def __init__(self, n: int = 1) -> None:
        self.sent: list[Abort] = []
        self.request = EngineRequest(5, n, "0", self.sent.append)

    def take(self, position: int, *tokens: int, sample: int = 0, finish: FinishReason | None = None) -> None:
        self.request.add(ProgressRow(5, sample, position, list(tokens), finish_reason=finish))

    async def tokens(self) -> list[int]:
        return [token for row in await self.request.rows() for token in row.tokens]


async def test_rows_come_in_order_and_waiting_is_for_news_only() -> None:
    world = World()
    world.take(0, 7)
    world.take(1, 8, 9)
    assert await world.tokens() == [7, 8, 9]
    waiting = asyncio.create_task(world.tokens())
    await asyncio.sleep(0)
    assert not waiting.done()
    world.take(3, 10, finish=FinishReason.STOP)
    assert await waiting == [10]
    assert world.request.done


async def test_an_acceptance_is_the_engines_word_or_its_first_row_and_no_news_of_the_stream() -> None:
    """HTTP-05: an acceptance does not wake a reader of rows."""
    by_word, by_row = World(), World()
    accepted = [asyncio.create_task(world.request.wait_accepted()) for world in (by_word, by_row)]
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
    world = World()
    waiting = asyncio.create_task(world.request.wait_accepted())
    await asyncio.sleep(0)
    world.request.fail(error)
    with pytest.raises(type(error), match=str(error)):
        await waiting
    with pytest.raises(type(error)):
        await world.request.wait_accepted()


async def test_what_is_there_already_is_not_applied_again() -> None:
    world = World()
    world.take(0, 7)
    world.take(0, 7)
    world.take(1, 8)
    world.take(0, 7, 8)
    assert await world.tokens() == [7, 8]


async def test_a_gap_fails_the_request_and_ends_it_at_the_engine() -> None:
    world = World()
    world.take(0, 7)
    world.take(3, 10)
    world.take(1, 8)
    assert await world.tokens() == [7]
    with pytest.raises(EngineFailure, match="tokens 1 to 2 of the output were lost"):
        await world.tokens()
    assert world.sent == [Abort(5)]


async def test_samples_have_positions_of_their_own() -> None:
    world = World(2)
    world.take(0, 7, sample=1)
    world.take(0, 8, sample=0)
    world.take(1, 9, sample=1, finish=FinishReason.LENGTH)
    world.take(0, 1, sample=2)
    assert [(row.sample, row.tokens) for row in await world.request.rows()] == [(1, [7]), (0, [8]), (1, [9])]
    assert not world.request.done


async def test_an_aborted_sample_is_heard_of_no_more() -> None:
    world = World(2)
    world.take(0, 7, sample=0)
    world.take(0, 8, sample=1)
    world.request.abort(0)
    world.request.abort(0)
    world.take(1, 9, sample=0, finish=FinishReason.ABORT)
    world.take(1, 10, sample=1, finish=FinishReason.STOP)
    assert world.sent == [Abort(5, 0)]
    assert await world.tokens() == [8, 10]
    world.request.abort(1)
    assert world.sent == [Abort(5, 0)]


async def test_an_error_comes_after_the_rows_before_it_and_stays() -> None:
    world = World()
    world.take(0, 7)
    world.request.fail(Overloaded("full", 2.0))
    world.request.fail(EngineFailure("later"))
    world.take(1, 8)
    assert await world.tokens() == [7]
    for _ in range(2):
        with pytest.raises(Overloaded):
            await world.tokens()


async def test_what_has_ended_does_not_fail_any_more_and_must_not_be_waited_for() -> None:
    world = World()
    world.take(0, 7, finish=FinishReason.STOP)
    world.request.fail(EngineFailure("later"))
    assert await world.tokens() == [7]
    with pytest.raises(RuntimeError, match="has ended"):
        await world.tokens()


async def test_a_last_row_needs_no_tokens() -> None:
    world = World()
    world.take(0, 7)
    world.take(1, finish=FinishReason.ABORT)
    assert [row.finish_reason for row in await world.request.rows()] == [None, FinishReason.ABORT]
