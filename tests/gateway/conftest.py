"""Run the tests of modules marked with `loop_factories` on asyncio's loop and on uvloop's, which the service uses."""

import asyncio
from collections.abc import Callable, Mapping

import pytest
import uvloop


def pytest_asyncio_loop_factories(
    config: pytest.Config, item: pytest.Item
) -> Mapping[str, Callable[[], asyncio.AbstractEventLoop]]:
    marked = any("loop_factories" in mark.kwargs for mark in item.iter_markers("asyncio"))
    return {"asyncio": asyncio.new_event_loop} | ({"uvloop": uvloop.new_event_loop} if marked else {})
