"""`RequestParser`: aiohttp's parser, but it keeps the requests before an unreadable one, and bounds the head's size.

aiohttp's parser loses the requests that came in one packet with something unreadable. With a queue of one message it
pauses after each request, so this class feeds it until nothing is left. What cannot be read becomes an error at its
place among the requests, so that the connection answers in order.

A request line may have 8 KiB, as in most servers. A head may have 64 KiB, in one field (a cookie or a sign-on token) or
in all fields together.
"""

import asyncio
from collections.abc import Sequence
from typing import Any

from aiohttp.base_protocol import BaseProtocol
from aiohttp.http import HttpRequestParser, RawRequestMessage
from aiohttp.http_exceptions import HttpProcessingError, LineTooLong
from aiohttp.streams import EMPTY_PAYLOAD, StreamReader
from aiohttp.web_protocol import MAX_MSG_QUEUE_SIZE, RequestPayloadError, _ErrInfo

KIB = 1024
MAX_LINE = 8 * KIB  # bytes
MAX_HEAD = 66 * KIB
"""Bytes of all names and values: 64 KiB for a long field, and 2 KiB for those that every client sends."""

MAX_FIELDS = 128

ParsedRequest = tuple[RawRequestMessage | _ErrInfo, StreamReader]


class RequestParser(HttpRequestParser):
    """The parser of one connection."""

    def __init__(self, protocol: BaseProtocol, loop: asyncio.AbstractEventLoop, limit: int) -> None:
        super().__init__(
            protocol,
            loop,
            limit,
            max_line_size=MAX_LINE,
            max_field_size=MAX_HEAD,
            max_headers=MAX_FIELDS,
            payload_exception=RequestPayloadError,
            max_msg_queue_size=1,
        )
        self._connection = protocol
        self._body: StreamReader = EMPTY_PAYLOAD  # of the last request
        self._head_size = 0  # bytes of a head that is not complete yet
        self.failed = False  # an unreadable request has come, and the rest is dropped

    @property
    def between_requests(self) -> bool:
        """Return whether the body of the last request is complete."""
        return self._body.is_eof()

    def feed_data(self, data: bytes, *_: Any) -> tuple[Sequence[ParsedRequest], bool, bytes]:  # type: ignore[override]
        """Return the requests in `data`, whether the last one asks for another protocol, and the data after it."""
        messages: list[ParsedRequest] = []
        upgraded, rest = False, b""
        if not self.failed:
            try:
                upgraded, rest = self._feed(data, messages)
            except HttpProcessingError as error:
                self.failed = True
                messages.append((_error(error), EMPTY_PAYLOAD))
        return messages, upgraded, rest

    def _feed(self, data: bytes, messages: list[ParsedRequest]) -> tuple[bool, bytes]:
        while True:
            in_head = self.between_requests
            self.message_consumed()
            more, upgraded, rest = super().feed_data(data)
            self._head_size = self._head_size + len(data) if in_head and not more else 0
            self._check(more)
            messages += more
            idle = not more and not data
            if idle or upgraded or self._connection._reading_paused or len(messages) >= MAX_MSG_QUEUE_SIZE:
                return upgraded, rest
            data = b""

    def _check(self, messages: Sequence[tuple[RawRequestMessage, StreamReader]]) -> None:
        """Raise `HttpProcessingError` if a head is too long, even if it is incomplete."""
        if self._head_size > MAX_LINE + MAX_HEAD:
            raise HttpProcessingError(code=431)
        for message, body in messages:
            self._body = body
            if sum(len(name) + len(value) for name, value in message.raw_headers) > MAX_HEAD:
                raise HttpProcessingError(code=431)


def _error(error: HttpProcessingError) -> _ErrInfo:
    if isinstance(error, LineTooLong):
        status = 414 if error.args[1] == MAX_LINE else 431
    else:
        status = 431 if error.code == 431 or error.message.startswith("Too many headers") else 400
    match status:
        case 414:
            return _ErrInfo(414, error, f"its first line is longer than {MAX_LINE} bytes")
        case 431:
            limits = f"{MAX_HEAD} bytes or {MAX_FIELDS} fields"
            return _ErrInfo(431, error, f"its headers are more than {limits}")
    return _ErrInfo(400, error, error.message)
