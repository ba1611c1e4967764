"""`Expect: 100-continue`: a client asks to be told when to send its body, so that one that is refused is never sent.

So it is told when the body is about to be read, and not when its headers have come: whatever is against the request
(its key, its path, its length) is said at once.
"""

from aiohttp import HttpVersion11, web

CONTINUE = b"HTTP/1.1 100 Continue\r\n\r\n"


async def check(request: web.Request) -> None:
    """Raise the status 417 if the request expects something else. HTTP/1.0 has no expectations."""
    if request.version >= HttpVersion11 and request.headers["Expect"].lower() != "100-continue":
        raise web.HTTPExpectationFailed


def waits(request: web.Request) -> bool:
    """Whether the client wants to be told, and has not sent its body anyway."""
    return "Expect" in request.headers and request.version >= HttpVersion11 and not request.content.is_eof()


async def go_on(request: web.Request) -> None:
    """Tell the client to send the body, if it waits for that."""
    if waits(request):
        await request.writer.write(CONTINUE)
        request.writer.output_size = 0  # the answer itself has not begun
