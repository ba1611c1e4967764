"""Reports the unknown fields of a request, which are ignored: in a header of its response, and in the log once.

The names come from clients. So they are shortened and percent-encoded: a header or the log gets only printable ASCII,
and no comma, which would separate two names.
"""

import logging
from collections.abc import Sequence
from urllib.parse import quote

from aiohttp import web

from services.gateway.gateway import logged_id
from shared.log_format import of_request

logger = logging.getLogger(__name__)

HEADER = "X-Quire-Ignored-Fields"
MAX_NAMES = 20  # in one header
MAX_NAME_LENGTH = 64  # characters
MAX_LOGGED = 1000  # names, over the life of the process

_NAMES = web.RequestKey("ignored fields", list[str])
_logged: set[str] = set()


def report(request: web.Request, fields: Sequence[str]) -> None:
    """Keep the names for the response's header, and log those that were not logged before."""
    if not fields:
        return
    request[_NAMES] = names = [quote(field[:MAX_NAME_LENGTH], safe="[]") for field in fields[:MAX_NAMES]]
    for name in names:
        if name not in _logged and len(_logged) < MAX_LOGGED:
            _logged.add(name)
            logger.warning(
                "a request has the field %s, which is ignored (logged once; --strict-fields refuses it)",
                name,
                extra=of_request(logged_id(request)),
            )


async def add_header(request: web.Request, response: web.StreamResponse) -> None:
    """Add the header to a response. Streams and errors have it too."""
    if names := request.get(_NAMES):
        response.headers[HEADER] = ", ".join(names)
