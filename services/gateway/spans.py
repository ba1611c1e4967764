"""`Tracing`: the OpenTelemetry spans of a gateway's requests.

An HTTP request is a server span. Its parent is the client's, if the request has W3C's `traceparent`. Each sample adds
three children: `queue`, `prefill` and `decode`, with the attribute `quire.choice`, the index of its choice in the
response. They are made when the sample ends, from the times that the metrics have too, so tokens on their way cost
nothing. If a sample ends before its first output, it is not known whether it was admitted: then it has one span,
`queue or prefill`. The last span of a sample has the event `finish`.

Names of attributes are those of OpenTelemetry's semantic conventions, and vLLM's in addition.

A thread of the library's sends the spans. It keeps a bounded number of them while the collector is away, and drops the
rest.
"""

import logging
import threading
import time

from aiohttp import web
from aiohttp.hdrs import METH_ALL
from aiohttp.typedefs import Handler, Middleware
from multidict import CIMultiDictProxy
from opentelemetry.context import Context
from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
from opentelemetry.propagators.textmap import Getter
from opentelemetry.sdk.resources import SERVICE_NAME, Resource
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import BatchSpanProcessor, SpanExporter
from opentelemetry.trace import Span, SpanKind, StatusCode, Tracer, set_span_in_context
from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator
from opentelemetry.util.types import AttributeValue

from services.gateway.engine_request import Interruption
from services.gateway.gateway import GATEWAY, REQUEST_ID
from services.gateway.metrics import SampleTimes
from services.gateway.middlewares import CLIENT_CLOSED, NO_ROUTE, UNLOGGED_PATHS, route_of
from services.gateway.prompt import PreparedPrompt
from services.gateway.tracing import current_trace
from shared.log_limit import LogLimit

FLUSH_TIMEOUT = 3.0
"""Seconds that the last spans get when the gateway ends."""

LIMITED_LOGGERS = (
    "opentelemetry.exporter.otlp.proto.http.trace_exporter",  # each try to export that failed
    "opentelemetry.sdk._shared_internal",  # spans that were dropped
    "opentelemetry.trace.span",  # each wrong `tracestate` of a client
)
"""Loggers of the library that may write at any rate."""

LOG_INTERVAL = 60.0
"""Seconds between two lines of a kind that one of them writes."""

MAX_CHOICES = 64
"""Choices of a response that have spans of their own. A request may have a thousand, which may end at the same time."""

SERVICE = "quire"
OPERATIONS = {"/v1/chat/completions": "chat", "/v1/responses": "chat", "/v1/completions": "text_completion"}
PROPAGATOR = TraceContextTextMapPropagator()

Attributes = dict[str, AttributeValue]


class Tracing:
    """Makes spans and exports them, for the time of a `with` block.

    OpenTelemetry's variables say what is sampled, how large batches are, and so on. Raise `ValueError` if they cannot
    be used.
    """

    def __init__(self, exporter: SpanExporter) -> None:
        self._provider = TracerProvider(resource=_resource(), shutdown_on_exit=False)
        self._provider.add_span_processor(BatchSpanProcessor(exporter))
        self._tracer = self._provider.get_tracer("quire.gateway")
        self._log_limits = {name: LogLimit(max_lines=1, interval=LOG_INTERVAL) for name in LIMITED_LOGGERS}

    @classmethod
    def to_collector(cls, url: str) -> "Tracing":
        """Return one that sends spans to `url`, or if it is empty where OpenTelemetry's variables say."""
        return cls(OTLPSpanExporter(endpoint=url or None))

    def __enter__(self) -> "Tracing":
        for name, limit in self._log_limits.items():
            logging.getLogger(name).addFilter(limit)
        return self

    def __exit__(self, *_: object) -> None:
        """Export the last spans, within `FLUSH_TIMEOUT`. The library's own timeout is ten times as long."""
        ending = threading.Thread(target=self._provider.shutdown, name="last spans", daemon=True)
        ending.start()
        ending.join(FLUSH_TIMEOUT)
        for name, limit in self._log_limits.items():
            logging.getLogger(name).removeFilter(limit)

    @property
    def middleware(self) -> Middleware:
        """Return the middleware that gives each request its trace. It has to be the outermost one."""

        @web.middleware
        async def trace(request: web.Request, handler: Handler) -> web.StreamResponse:
            route = route_of(request)
            if route in UNLOGGED_PATHS:
                return await handler(request)
            spans = RequestSpans(self._tracer, request, route)
            if not spans.recorded:
                return await handler(request)
            token = current_trace.set(spans)
            status = CLIENT_CLOSED
            try:
                response = await handler(request)
                status = response.status
                return response
            finally:
                current_trace.reset(token)
                spans.end(request, status)

        return trace


class RequestSpans:
    """The spans of one HTTP request. It is a `RequestTrace`."""

    def __init__(self, tracer: Tracer, request: web.Request, route: str) -> None:
        self._tracer = tracer
        self._epoch_ns = time.time_ns() - time.monotonic_ns()  # of the monotonic clock, which no one sets
        parent = PROPAGATOR.extract(request.headers, getter=_HEADERS)
        name, attributes = _http_span(request, route)
        began = self._ns(time.monotonic())
        self._span = tracer.start_span(name, parent, SpanKind.SERVER, attributes, start_time=began)
        self._context: Context = set_span_in_context(self._span)
        self._operation = OPERATIONS.get(route, "")
        self._num_input = self._num_output = 0
        self._adapter = ""  # that the prompts use
        self._finish_reasons: dict[int, str] = {}  # by choice
        self._latencies: Attributes = {}  # of the first choice

    @property
    def recorded(self) -> bool:
        """Return whether the request is sampled. If it is not, nothing need be noted."""
        return self._span.is_recording()

    def add_prompt(self, prompt: PreparedPrompt) -> None:
        """Note a prompt of the request."""
        if not self._num_input:
            self._span.set_attributes(_sampling_attributes(prompt))
            self._adapter = prompt.adapter
        self._num_input += len(prompt.tokens)

    def end_sample(
        self, choice: int, times: SampleTimes, reason: str, *, engine: str, num_output: int, now: float
    ) -> None:
        """Add the spans of a sample that has ended for `reason`."""
        self._num_output += num_output
        self._finish_reasons[choice] = reason
        if choice == 0:
            self._latencies = _latencies(times, now)
        if choice >= MAX_CHOICES:
            return
        attributes: Attributes = {"quire.choice": choice, "quire.engine": engine}
        *phases, (name, start, end) = _phases(times, now)
        for phase, began, ended in phases:
            self._child(phase, began, attributes).end(self._ns(ended))
        preemptions = times.scheduling.preemptions if times.scheduling else 0
        totals: Attributes = {"gen_ai.usage.output_tokens": num_output, "quire.preemptions": preemptions}
        last = self._child(name, start, attributes | totals)
        last.add_event("finish", {"gen_ai.response.finish_reasons": [reason]}, self._ns(end))
        if reason == "error":
            last.set_status(StatusCode.ERROR)
        last.end(self._ns(end))

    def add_interruption(self, interruption: Interruption, first_choice: int) -> None:
        """Add events to the server span: samples lost their engine, and were submitted to the next one."""
        choices = [first_choice + sample for sample in interruption.samples][:MAX_CHOICES]
        lost: Attributes = {
            "quire.engine": interruption.engine,
            "quire.reason": interruption.reason,
            "quire.choices": choices,
        }
        self._span.add_event("engine_lost", lost, self._ns(interruption.began))
        if interruption.placed is not None:
            resumed: Attributes = {"quire.engine": interruption.next_engine, "quire.choices": choices}
            if interruption.ended is not None:
                resumed["quire.recovery_seconds"] = interruption.ended - interruption.began
            self._span.add_event("resumed", resumed, self._ns(interruption.placed))

    def end(self, request: web.Request, status: int) -> None:
        """End the server span. `status` is the response's."""
        attributes: Attributes = {"http.response.status_code": status}
        if self._operation:
            attributes |= self._generation_attributes(request)
        if status >= 500 or "error" in self._finish_reasons.values():
            attributes["error.type"] = str(status) if status >= 500 else "engine_failure"
            self._span.set_status(StatusCode.ERROR)
        self._span.set_attributes(attributes)
        self._span.end(self._ns(time.monotonic()))

    def _generation_attributes(self, request: web.Request) -> Attributes:
        model, reasons = self._adapter or request.app[GATEWAY].model.name, self._finish_reasons
        return self._latencies | {
            "gen_ai.operation.name": self._operation,
            "gen_ai.provider.name": SERVICE,
            "gen_ai.request.model": model,
            "gen_ai.response.model": model,
            "gen_ai.response.finish_reasons": [reasons[choice] for choice in sorted(reasons)],
            "gen_ai.usage.input_tokens": self._num_input,
            "gen_ai.usage.output_tokens": self._num_output,
            "gen_ai.request.id": request[REQUEST_ID],
            "gen_ai.usage.prompt_tokens": self._num_input,
            "gen_ai.usage.completion_tokens": self._num_output,
            "gen_ai.usage.num_sequences": len(reasons),
        }

    def _child(self, name: str, start: float, attributes: Attributes) -> Span:
        return self._tracer.start_span(name, self._context, attributes=attributes, start_time=self._ns(start))

    def _ns(self, seconds: float) -> int:
        """Return a time of the monotonic clock in nanoseconds since 1970."""
        return self._epoch_ns + int(seconds * 1e9)


def _phases(times: SampleTimes, now: float) -> list[tuple[str, float, float]]:
    """Return the phases of a sample that has ended now, with the beginning and the end of each."""
    if times.scheduling is None:
        return [("queue or prefill", times.submitted, now)]
    admitted = times.submitted + times.scheduling.queued_seconds
    if times.first_token is None:
        return [("queue", times.submitted, admitted), ("prefill", admitted, max(now, admitted))]
    first_token = max(times.first_token, admitted)
    return [
        ("queue", times.submitted, admitted),
        ("prefill", admitted, first_token),
        ("decode", first_token, max(now, first_token)),
    ]


def _latencies(times: SampleTimes, now: float) -> Attributes:
    """Return a sample's latencies in seconds, by vLLM's names and definitions."""
    latencies: Attributes = {"gen_ai.latency.e2e": now - times.arrived}
    if times.first_token is None or times.last_token is None:
        return latencies
    latencies["gen_ai.latency.time_to_first_token"] = times.first_token - times.arrived
    latencies["gen_ai.latency.time_in_model_decode"] = times.last_token - times.first_token
    if times.scheduling is not None:
        admitted = times.submitted + times.scheduling.queued_seconds
        latencies["gen_ai.latency.time_in_queue"] = times.scheduling.queued_seconds
        latencies["gen_ai.latency.time_in_model_prefill"] = max(times.first_token - admitted, 0.0)
        latencies["gen_ai.latency.time_in_model_inference"] = max(times.last_token - admitted, 0.0)
    return latencies


def _http_span(request: web.Request, route: str) -> tuple[str, Attributes]:
    """Return the name of the server span, and the attributes that a sampler may look at."""
    method = request.method if request.method in METH_ALL else "_OTHER"
    attributes: Attributes = {
        "http.request.method": method,
        "url.path": request.rel_url.raw_path,
        "url.scheme": request.scheme,
    }
    return (method, attributes) if route == NO_ROUTE else (f"{method} {route}", attributes | {"http.route": route})


def _sampling_attributes(prompt: PreparedPrompt) -> Attributes:
    params, sampling = prompt.params, prompt.sampling
    attributes: Attributes = {
        "gen_ai.request.max_tokens": sampling.max_tokens,
        "gen_ai.request.temperature": params.temperature,
        "gen_ai.request.top_p": params.top_p,
        "gen_ai.request.top_k": params.top_k,
        "gen_ai.request.presence_penalty": params.presence_penalty,
        "gen_ai.request.frequency_penalty": params.frequency_penalty,
        "gen_ai.request.choice.count": params.n,
        "gen_ai.request.n": params.n,
    }
    return attributes if params.seed is None else attributes | {"gen_ai.request.seed": params.seed}


def _resource() -> Resource:
    """Return what all spans have in common: OpenTelemetry's variables, and a name unless they have one."""
    resource = Resource.create()
    if str(resource.attributes[SERVICE_NAME]).startswith("unknown_service"):
        resource = resource.merge(Resource({SERVICE_NAME: SERVICE}))
    return resource


class _Headers(Getter[CIMultiDictProxy[str]]):
    """Reads the headers of a request for OpenTelemetry, all fields of a name."""

    def get(self, carrier: CIMultiDictProxy[str], key: str) -> list[str] | None:
        return carrier.getall(key, None)

    def keys(self, carrier: CIMultiDictProxy[str]) -> list[str]:
        return list(carrier)


_HEADERS = _Headers()
