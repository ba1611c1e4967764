"""`Expect: 100-continue`: a client waits for permission to send its body, so that a refused one is never sent.

The permission is sent when the body is about to be read, not when the headers have come: a request whose key, path or
length is wrong is refused at once.
"""

from aiohttp import HttpVersion11, web

CONTINUE = b"HTTP/1.1 100 Continue\r\n\r\n"


async def check(request: web.Request) -> None:
    """Raise `HTTPExpectationFailed` (417) if the request expects something else. HTTP/1.0 has no expectations."""
    if request.version >= HttpVersion11 and request.headers["Expect"].lower() != "100-continue":
        raise web.HTTPExpectationFailed


def awaits_continue(request: web.Request) -> bool:
    """Return whether the client waits for permission, and has not sent its body anyway."""
    return "Expect" in request.headers and request.version >= HttpVersion11 and not request.content.is_eof()


async def send_continue(request: web.Request) -> None:
    """Permit the client to send its body, if it waits for that."""
    if awaits_continue(request):
        await request.writer.write(CONTINUE)
        request.writer.output_size = 0  # the answer itself has not begun
