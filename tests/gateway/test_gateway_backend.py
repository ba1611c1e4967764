"""Tests of `Backend` and `EngineConnection`, with fake engines or none."""

import errno
import logging
from contextlib import contextmanager
from typing import Any

import pytest
import zmq

from services.gateway import engine_connection
from services.gateway.backend import Backend
from tests.waiting import until

NOWHERE = "ipc://@quire-test-nobody-listens-here"


async def test_an_engine_that_cannot_be_connected_to_ends_no_other(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    connect, opened = engine_connection.connect, []

    @contextmanager
    def fail_for_some(context: Any, address: str, *args: Any) -> Any:
        opened.append(address)
        if address == f"{NOWHERE}-2":
            raise zmq.ZMQError(errno.EMFILE)
        with connect(context, address, *args) as connection:
            yield connection

    monkeypatch.setattr(engine_connection, "connect", fail_for_some)
    async with Backend([f"{NOWHERE}-1", f"{NOWHERE}-2"]) as backend:
        await until(lambda: opened.count(f"{NOWHERE}-2") >= 3)
        assert opened.count(f"{NOWHERE}-1") == 1
        assert len(backend._connections) == 2
    said = [record.getMessage() for record in caplog.records]
    assert said == [f"no connection to the engine at {NOWHERE}-2: Too many open files"]
