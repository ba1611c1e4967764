"""Tests of `StreamWrites`: what is written in the event loop's next turn."""

import asyncio
from typing import Any, cast

from services.gateway.stream_writes import StreamWrites


class FakeTransport:
    """A connection that notes what is written, with its name."""

    def __init__(self, name: str, written: list[tuple[str, bytes]]) -> None:
        self.name, self.written, self.closing = name, written, False

    def is_closing(self) -> bool:
        return self.closing

    def write(self, data: bytes) -> None:
        assert not self.closing
        self.written.append((self.name, data))


async def test_connections_are_written_one_behind_the_other_in_the_next_turn() -> None:
    writes, written = StreamWrites(), []
    one, two, gone = (cast(Any, FakeTransport(name, written)) for name in ("one", "two", "gone"))
    for transport, data in ((one, b"a"), (two, b"b"), (gone, b"c"), (one, b"d")):
        writes.add(transport, data)
    gone.closing = True
    assert not written
    await asyncio.sleep(0)
    assert written == [("one", b"ad"), ("two", b"b")]
    writes.add(two, b"e")
    await asyncio.sleep(0)
    assert written[2:] == [("two", b"e")]


async def test_an_end_is_written_at_once_and_once() -> None:
    writes, written = StreamWrites(), []
    writes.add(cast(Any, FakeTransport("one", written)), b"a")
    writes.flush()
    assert written == [("one", b"a")]
    await asyncio.sleep(0)
    assert len(written) == 1
