"""Fields that were ignored because this server does not know them: each answer names them, and the log does once.

Names are a client's, so they are shortened, and written as in a URL: nothing but printable ASCII gets into a header or
the log, and no comma that would make two names of one.
"""

import logging
from collections.abc import Sequence
from urllib.parse import quote

from aiohttp import web

logger = logging.getLogger(__name__)

HEADER = "X-Quire-Ignored-Fields"
NAMES = 20  # in one header
LENGTH = 64  # characters of a name
LOGGED = 1000  # names, until the process ends

_NAMES = web.RequestKey("ignored fields", list[str])
_logged: set[str] = set()


def note(request: web.Request, fields: Sequence[str]) -> None:
    """Keep the names for the answer's header, and log those that are new."""
    if not fields:
        return
    request[_NAMES] = names = [quote(field[:LENGTH], safe="[]") for field in fields[:NAMES]]
    for name in names:
        if name not in _logged and len(_logged) < LOGGED:
            _logged.add(name)
            logger.warning("a request has the field %s, which is ignored (said once; --strict-fields refuses it)", name)


async def sign(request: web.Request, response: web.StreamResponse) -> None:
    """Write the names on the answer, streams and errors included."""
    if names := request.get(_NAMES):
        response.headers[HEADER] = ", ".join(names)
