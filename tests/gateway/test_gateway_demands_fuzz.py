"""Tests that no demand on the form of an output, however wrong, is an error of the gateway's own."""

import asyncio
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.gateway.fakes import Client, FakeBackend, error_of, serve
from tests.gateway.test_gateway_limits import PATHS, body
from tests.text.demands import chat_demands, demands
from tests.text.tool_templates import TEMPLATES
from tests.waiting import PATIENCE


async def status_of(client: Client, path: str, fields: dict[str, Any]) -> int:
    """Return the status of an answer, which is none if it is late. An error has its shape and names a field."""
    async with asyncio.timeout(PATIENCE), client.post(path, json=body(path, max_tokens=3) | fields) as response:
        if response.status != 200:
            assert (await error_of(response))["message"]
        return response.status


@pytest.mark.parametrize("family", ["hermes", "qwen3_coder", "llama4_pythonic"])
def test_every_demand_is_served_or_refused(family: str) -> None:
    statuses: list[int] = []
    with asyncio.Runner() as runner:
        serving = serve(FakeBackend(max_model_len=100_000), template=TEMPLATES[family])
        client = runner.run(serving.__aenter__())

        @settings(deadline=None, max_examples=100)
        @given(fields=st.one_of(demands.map(lambda it: (PATHS[0], it)), chat_demands.map(lambda it: (PATHS[1], it))))
        def check(fields: tuple[str, dict[str, Any]]) -> None:
            statuses.append(runner.run(status_of(client, *fields)))
            assert statuses[-1] in (200, 400)

        try:
            check()
        finally:
            runner.run(serving.__aexit__(None, None, None))
    assert {200, 400} <= set(statuses)
