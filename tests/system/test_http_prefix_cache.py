"""Tests what HTTP clients see of the prefix cache: salts keep them apart, and a reset empties it at every engine."""

from contextlib import AsyncExitStack

from tests.system.http_client import Answer, Listening, ask, complete, talk
from tests.system.processes import engine, gateways, server

PROMPT = list(range(20, 84))  # four blocks
RESET = "--enable-reset-prefix-cache"


async def cached(at: Listening, **fields: str) -> int:
    """Return how many tokens of the prompt were found in the cache."""
    answer = await complete(at, PROMPT, 2, **fields)
    count: int = answer.json["usage"]["prompt_tokens_details"]["cached_tokens"]
    return count


async def reset(at: Listening) -> Answer:
    return await ask(at, "/reset_prefix_cache", any="body")


async def test_clients_of_different_salts_share_nothing_and_a_reset_is_for_all() -> None:
    async with server(talk(), front=[RESET]) as system:
        assert [await cached(system), await cached(system, cache_salt="a")] == [0, 0]
        assert await cached(system) == await cached(system, cache_salt="a") > 0
        assert await cached(system, cache_salt="b") == 0
        assert (await reset(system)).json == {"success": True}
        assert [await cached(system), await cached(system, cache_salt="a")] == [0, 0]
        assert await cached(system) > 0


async def test_a_reset_reaches_every_engine_or_says_that_it_did_not() -> None:
    async with AsyncExitStack() as stack:
        engines = [await stack.enter_async_context(engine(talk(), f"--engine={name}")) for name in "ab"]
        (front,) = await stack.enter_async_context(gateways(1, engines, RESET, "--routing-policy=round_robin"))
        assert [await cached(front) for _ in range(4)] == [0, 0, 63, 63]
        assert (await reset(front)).json == {"success": True}
        assert [await cached(front) for _ in range(2)] == [0, 0]
        engines[1].scheduler.restart = False
        await engines[1].scheduler.stop()
        assert (await reset(front)).error["type"] == "ServiceUnavailableError"
