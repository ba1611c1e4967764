"""Traces of requests for an OpenTelemetry collector, if one is named.

`spans.py` makes the spans, and is imported only if they are wanted: it needs the extra `tracing`. The handlers of a
request and their tasks find its trace in `current_trace`.
"""

import logging
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from typing import TYPE_CHECKING, Protocol
from urllib.parse import urlsplit

from aiohttp.typedefs import Middleware

from services.gateway.engine_request import Interruption
from services.gateway.metrics import SampleTimes
from services.gateway.prompt import PreparedPrompt
from shared.errors import ConfigError

if TYPE_CHECKING:
    from services.gateway.spans import Tracing

logger = logging.getLogger(__name__)

PROTOCOL = "http/protobuf"
PROTOCOL_VARIABLES = ("OTEL_EXPORTER_OTLP_TRACES_PROTOCOL", "OTEL_EXPORTER_OTLP_PROTOCOL")
ENDPOINT_VARIABLES = ("OTEL_EXPORTER_OTLP_TRACES_ENDPOINT", "OTEL_EXPORTER_OTLP_ENDPOINT")
"""OpenTelemetry's own variables, the more specific one first. Its library reads these and many more."""


class RequestTrace(Protocol):
    """The trace of one HTTP request. Times are seconds of the monotonic clock."""

    def add_prompt(self, prompt: PreparedPrompt) -> None:
        """Note a prompt of the request."""

    def end_sample(
        self, choice: int, times: SampleTimes, reason: str, *, engine: str, num_output: int, now: float
    ) -> None:
        """Note that a sample has ended for `reason`. `choice` is its index in the response."""

    def add_interruption(self, interruption: Interruption, first_choice: int) -> None:
        """Note that samples of a prompt lost their engine. `first_choice` is that of the prompt."""


current_trace: ContextVar[RequestTrace | None] = ContextVar("current_trace", default=None)
"""The trace of the request that this task serves; None if it has none."""


@contextmanager
def tracing(endpoint: str, environment: Mapping[str, str]) -> Iterator[tuple[Middleware, ...]]:
    """Yield the middleware that traces requests, or none if no collector is named. Export the last spans at the end.

    `endpoint` is --otlp-traces-endpoint; without it, OpenTelemetry's own variables may name one. Raise `ConfigError` if
    the flag's cannot be used. If the variables' cannot, log that and trace nothing: they may be meant for others.
    """
    if not endpoint and not _is_on(environment):
        yield ()
        return
    try:
        spans = _load(endpoint, environment)
    except (ImportError, ValueError) as error:
        if endpoint:
            raise ConfigError(f"--otlp-traces-endpoint {endpoint}: {error}") from error
        logger.warning("requests are not traced, although OTEL_* variables name a collector: %s", error)
        yield ()
    else:
        with spans:
            yield (spans.middleware,)


def _load(endpoint: str, environment: Mapping[str, str]) -> "Tracing":
    """Return what makes spans. Raise `ImportError` without the extra, and `ValueError` if the settings are wrong."""
    url = _check(endpoint, environment)
    try:
        from services.gateway.spans import Tracing
    except ImportError as error:
        missing = f"there is no {error.name}, which the extra `tracing` brings: pip install 'quire-server[tracing]'"
        raise ImportError(missing) from error
    return Tracing.to_collector(url)


def _is_on(environment: Mapping[str, str]) -> bool:
    """Return whether OpenTelemetry's variables ask for traces."""
    if environment.get("OTEL_TRACES_EXPORTER", "otlp") != "otlp" or environment.get("OTEL_SDK_DISABLED") == "true":
        return False
    return any(environment.get(name) for name in ENDPOINT_VARIABLES)


def _check(endpoint: str, environment: Mapping[str, str]) -> str:
    """Return the URL to which spans are sent, or '' for that of OpenTelemetry's variables. Raise `ValueError`."""
    protocol = next(filter(None, map(environment.get, PROTOCOL_VARIABLES)), PROTOCOL)
    if protocol != PROTOCOL:
        raise ValueError(f"the protocol is {protocol}, but spans are sent by {PROTOCOL} only")
    url = urlsplit(endpoint or next(filter(None, map(environment.get, ENDPOINT_VARIABLES))))
    if url.scheme not in ("http", "https") or not url.netloc:
        raise ValueError("must be a URL that begins with http:// or https://, since spans are sent by " + PROTOCOL)
    return endpoint and (endpoint if url.path.strip("/") else endpoint.rstrip("/") + "/v1/traces")
