"""`Collector`: an OpenTelemetry collector for tests. It receives spans over HTTP and keeps them."""

import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest
from opentelemetry.proto.common.v1.common_pb2 import AnyValue, KeyValue
from opentelemetry.proto.trace.v1.trace_pb2 import Span


class Collector:
    """Answers each export with `status`, and not before `answers` is set."""

    def __init__(self, status: int = 200) -> None:
        self.requests: list[tuple[str, ExportTraceServiceRequest]] = []  # with their paths
        self.tries = 0
        self.answers = threading.Event()
        self.answers.set()
        self._status = status
        self._server = ThreadingHTTPServer(("127.0.0.1", 0), _handler(self))
        self.url = f"http://127.0.0.1:{self._server.server_port}"

    @contextmanager
    def running(self) -> Iterator["Collector"]:
        """Receive for the time of the block."""
        thread = threading.Thread(target=self._server.serve_forever, daemon=True)
        thread.start()
        try:
            yield self
        finally:
            self.answers.set()
            self._server.shutdown()
            thread.join()
            self._server.server_close()

    @property
    def spans(self) -> list[Span]:
        """Return the spans that have come, in order."""
        resources = [resource for _, request in self.requests for resource in request.resource_spans]
        return [span for resource in resources for scope in resource.scope_spans for span in scope.spans]

    def receive(self, path: str, body: bytes) -> int:
        """Return the status of an answer."""
        self.tries += 1
        self.answers.wait()
        if self._status == 200:
            self.requests.append((path, ExportTraceServiceRequest.FromString(body)))
        return self._status


def _handler(collector: Collector) -> type[BaseHTTPRequestHandler]:
    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            body = self.rfile.read(int(self.headers["Content-Length"]))
            self.send_response(collector.receive(self.path, body))
            self.end_headers()

        def log_message(self, *_: object) -> None:
            """Say nothing."""

    return Handler


def attributes(pairs: Sequence[KeyValue]) -> dict[str, Any]:
    """Return the attributes of a span, an event or a resource."""
    return {pair.key: _value(pair.value) for pair in pairs}


def _value(value: AnyValue) -> Any:
    kind = value.WhichOneof("value")
    if kind == "array_value":
        return [_value(one) for one in value.array_value.values]
    return getattr(value, kind) if kind else None
