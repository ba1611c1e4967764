"""Tests of the spans that a gateway makes of its requests, and of what happens without a collector."""

import asyncio
import os
import subprocess
import sys
from collections.abc import Sequence
from typing import Any

import pytest
from opentelemetry.sdk.trace import ReadableSpan
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from opentelemetry.trace import SpanKind, StatusCode

from services.gateway import spans as spans_module
from services.gateway.engine_request import Interruption
from services.gateway.metrics import SampleTimes
from services.gateway.spans import MAX_CHOICES, Tracing
from services.gateway.tracing import tracing
from shared.errors import ConfigError, EngineFailure, Overloaded
from shared.protocol import AdapterInfo, SchedulingInfo
from tests.gateway.fakes import FakeBackend, endless, ids, says, serve
from tests.otlp_collector import Collector
from tests.waiting import until

TRACE, PARENT = "4bf92f3577b34da6a3ce929d0e0e4736", "00f067aa0ba902b7"
SAMPLED = {"traceparent": f"00-{TRACE}-{PARENT}-01"}
PHASES = ("queue", "prefill", "decode")


class Recorder:
    """A tracing whose spans stay here."""

    def __init__(self) -> None:
        self._exporter = InMemorySpanExporter()
        self.tracing = Tracing(self._exporter)

    def __enter__(self) -> "Recorder":
        self.tracing.__enter__()
        return self

    def __exit__(self, *_: object) -> None:
        self.tracing.__exit__()

    @property
    def spans(self) -> Sequence[ReadableSpan]:
        """Return the spans. The block must have ended."""
        return self._exporter.get_finished_spans()

    @property
    def server(self) -> ReadableSpan:
        """Return the only span of an HTTP request."""
        (span,) = [span for span in self.spans if span.kind is SpanKind.SERVER]
        return span

    def of_choice(self, choice: int) -> list[ReadableSpan]:
        return [span for span in self.spans if attributes(span).get("quire.choice") == choice]


def attributes(span: ReadableSpan) -> dict[str, Any]:
    return dict(span.attributes or {})


def events(span: ReadableSpan) -> list[tuple[str, dict[str, Any]]]:
    return [(event.name, dict(event.attributes or {})) for event in span.events]


def names(spans: Sequence[ReadableSpan]) -> tuple[str, ...]:
    return tuple(span.name for span in spans)


async def test_a_request_is_a_server_span_with_the_phases_of_its_sample() -> None:
    backend = FakeBackend(says("one two three"))
    backend.admission, backend.cached_tokens = SchedulingInfo(0.0, 2), 1
    with Recorder() as recorder:
        async with serve(backend, (recorder.tracing.middleware,)) as client:
            body = {"messages": [{"role": "user", "content": "hi"}], "max_tokens": 9, "temperature": 0.5, "seed": 3}
            headers = {**SAMPLED, "tracestate": "vendor=1", "X-Request-Id": "mine"}
            async with client.post("/v1/chat/completions", json=body, headers=headers) as response:
                usage = (await response.json())["usage"]
    server, phases = recorder.server, recorder.of_choice(0)
    assert server.name == "POST /v1/chat/completions"
    assert f"{server.context.trace_id:032x}" == TRACE
    assert server.parent is not None
    assert f"{server.parent.span_id:016x}" == PARENT
    assert server.context.trace_state.get("vendor") == "1"
    assert names(phases) == PHASES
    assert all(span.parent is not None and span.parent.span_id == server.context.span_id for span in phases)
    bounds = [server.start_time, *(span.start_time for span in phases), phases[-1].end_time, server.end_time]
    assert bounds == sorted(bounds)  # type: ignore[type-var]
    assert [span.end_time for span in phases[:-1]] == [span.start_time for span in phases[1:]]
    assert events(phases[-1]) == [("finish", {"gen_ai.response.finish_reasons": ("stop",)})]
    assert attributes(phases[-1])["quire.preemptions"] == 2
    said = attributes(server)
    expected = {
        "http.request.method": "POST",
        "http.route": "/v1/chat/completions",
        "http.response.status_code": 200,
        "gen_ai.operation.name": "chat",
        "gen_ai.provider.name": "quire",
        "gen_ai.response.model": "tiny",
        "gen_ai.request.id": "mine",
        "gen_ai.request.max_tokens": 9,
        "gen_ai.request.temperature": 0.5,
        "gen_ai.request.seed": 3,
        "gen_ai.request.n": 1,
        "gen_ai.response.finish_reasons": ("stop",),
        "gen_ai.usage.input_tokens": usage["prompt_tokens"],
        "gen_ai.usage.prompt_tokens": usage["prompt_tokens"],
        "gen_ai.usage.output_tokens": usage["completion_tokens"],
        "gen_ai.usage.completion_tokens": usage["completion_tokens"],
    }
    assert {name: said.get(name) for name in expected} == expected
    assert server.status.status_code is StatusCode.UNSET
    latency = {name.removeprefix("gen_ai.latency."): value for name, value in said.items() if "latency" in name}
    assert latency["time_in_queue"] == 0.0
    assert latency["time_in_model_inference"] == pytest.approx(
        latency["time_in_model_prefill"] + latency["time_in_model_decode"]
    )
    assert latency["time_to_first_token"] + latency["time_in_model_decode"] <= latency["e2e"]


async def test_a_request_of_an_adapter_has_its_name() -> None:
    backend = FakeBackend()
    backend.adapters = {"a": AdapterInfo("a", "/a")}
    with Recorder() as recorder:
        async with serve(backend, (recorder.tracing.middleware,)) as client:
            await client.complete(prompt="one", model="a")
    said = attributes(recorder.server)
    assert said["gen_ai.request.model"] == said["gen_ai.response.model"] == "a"


async def test_each_sample_of_each_prompt_has_its_phases_under_the_index_of_its_choice() -> None:
    texts = ("one", "two three")
    backend = FakeBackend(says(*texts))
    backend.admission = SchedulingInfo(0.0, 0)
    with Recorder() as recorder:
        async with serve(backend, (recorder.tracing.middleware,)) as client:
            await client.stream_completion(prompt=["hi", "hello"], n=2)
    assert [names(recorder.of_choice(choice)) for choice in range(4)] == [PHASES] * 4
    outputs = [attributes(recorder.of_choice(choice)[-1])["gen_ai.usage.output_tokens"] for choice in range(4)]
    assert outputs == 2 * [len(ids(text)) + 1 for text in texts]
    assert attributes(recorder.server)["gen_ai.usage.output_tokens"] == sum(outputs)
    assert attributes(recorder.server)["gen_ai.usage.num_sequences"] == 4


async def test_a_request_with_very_many_choices_has_spans_for_the_first_ones() -> None:
    with Recorder() as recorder:
        async with serve(outer=(recorder.tracing.middleware,)) as client:
            await client.complete(prompt=["hi"] * 3, n=MAX_CHOICES // 2, max_tokens=1)
    assert {attributes(span).get("quire.choice") for span in recorder.spans} == {None, *range(MAX_CHOICES)}
    assert attributes(recorder.server)["gen_ai.usage.num_sequences"] == MAX_CHOICES * 3 // 2


async def test_a_client_that_leaves_ends_the_phase_in_which_its_request_is() -> None:
    backend = FakeBackend(endless)
    backend.pause_at = 0
    with Recorder() as recorder:
        async with serve(backend, (recorder.tracing.middleware,)) as client:
            asking = asyncio.ensure_future(client.complete(prompt="hi"))
            await backend.submitted.wait()
            asking.cancel()
            await backend.requests[0].left.wait()
    assert names(recorder.of_choice(0)) == ("queue or prefill",)
    assert events(recorder.of_choice(0)[0]) == [("finish", {"gen_ai.response.finish_reasons": ("abort",)})]
    assert attributes(recorder.server)["http.response.status_code"] == 499


def test_phases_follow_each_other_whatever_is_known_of_the_sample() -> None:
    times = SampleTimes(1.0, 2.0)
    assert spans_module._phases(times, 9.0) == [("queue or prefill", 2.0, 9.0)]
    times.scheduling = SchedulingInfo(3.0, 0)
    assert spans_module._phases(times, 9.0) == [("queue", 2.0, 5.0), ("prefill", 5.0, 9.0)]
    times.first_token = times.last_token = 6.0
    assert spans_module._phases(times, 9.0) == [("queue", 2.0, 5.0), ("prefill", 5.0, 6.0), ("decode", 6.0, 9.0)]


async def test_failures_are_errors_and_refusals_are_not() -> None:
    backend = FakeBackend()
    backend.fail_at, backend.failure = 1, EngineFailure("gone")
    with Recorder() as failed:
        async with serve(backend, (failed.tracing.middleware,)) as client:
            body = {"prompt": "hi", "stream": True}
            async with client.post("/v1/completions", json=body) as response:
                assert response.status == 200, "it has begun before it fails"
                await response.text()
    backend.refusal = Overloaded("full", 1)
    with Recorder() as refused:
        async with serve(backend, (refused.tracing.middleware,)) as client:
            assert (await client.refused("/v1/completions", {"prompt": "hi"}))[0] == 429
    assert failed.server.status.status_code is failed.of_choice(0)[-1].status.status_code is StatusCode.ERROR
    assert attributes(failed.server)["error.type"] == "engine_failure"
    assert refused.server.status.status_code is StatusCode.UNSET
    assert len(refused.spans) == 1


async def test_losses_are_events_of_the_server_span() -> None:
    backend = FakeBackend()
    backend.pause_at = 1
    with Recorder() as recorder:
        async with serve(backend, (recorder.tracing.middleware,)) as client:
            asking = asyncio.ensure_future(client.complete(prompt="hi", n=2))
            await backend.submitted.wait()
            loop = asyncio.get_running_loop()  # whose clock is the monotonic one
            began = loop.time()
            resumed = Interruption("a", "its connection ended", [1], began, began + 0.5, "b", began + 2.0)
            backend.requests[0].interruptions += [resumed, Interruption("b", "silent", [0, 1], began + 3.0)]
            backend.go_on.set()
            await asking
    assert events(recorder.server) == [
        ("engine_lost", {"quire.engine": "a", "quire.reason": "its connection ended", "quire.choices": (1,)}),
        ("resumed", {"quire.engine": "b", "quire.choices": (1,), "quire.recovery_seconds": 2.0}),
        ("engine_lost", {"quire.engine": "b", "quire.reason": "silent", "quire.choices": (0, 1)}),
    ]
    lost, resumed_at, _ = (event.timestamp for event in recorder.server.events)
    assert resumed_at - lost == pytest.approx(0.5e9, abs=1e3)


async def test_probes_have_no_spans_and_unknown_paths_no_route() -> None:
    with Recorder() as recorder:
        async with serve(outer=(recorder.tracing.middleware,)) as client:
            for path in ("/health", "/metrics", "/nowhere"):
                await client.get(path)
    assert (recorder.server.name, attributes(recorder.server).get("http.route")) == ("GET", None)


async def test_a_client_and_the_environment_decide_what_is_sampled(monkeypatch: pytest.MonkeyPatch) -> None:
    with Recorder() as recorder:
        async with serve(outer=(recorder.tracing.middleware,)) as client:
            headers = {"traceparent": f"00-{TRACE}-{PARENT}-00"}  # not sampled
            await client.post("/v1/completions", json={"prompt": "hi"}, headers=headers)
    assert recorder.spans == ()
    monkeypatch.setenv("OTEL_TRACES_SAMPLER", "always_off")
    with Recorder() as off:
        async with serve(outer=(off.tracing.middleware,)) as client:
            await client.post("/v1/completions", json={"prompt": "hi"}, headers=SAMPLED)
    assert off.spans == ()


@pytest.mark.parametrize("header", ["", "nonsense", "00-" + "0" * 32 + "-" + "0" * 16 + "-01", "ff-x-y-z", "é" * 900])
async def test_a_traceparent_that_is_none_begins_a_trace(header: str) -> None:
    with Recorder() as recorder:
        async with (
            serve(outer=(recorder.tracing.middleware,)) as client,
            client.get("/version", headers={"traceparent": header}) as response,
        ):
            assert response.status == 200
    assert recorder.server.parent is None


async def test_clients_with_a_wrong_tracestate_do_not_fill_the_log(caplog: pytest.LogCaptureFixture) -> None:
    with Recorder() as recorder:
        async with serve(outer=(recorder.tracing.middleware,)) as client:
            for _ in range(5):
                await client.get("/version", headers={**SAMPLED, "tracestate": "é=1"})
    assert {f"{span.context.trace_id:032x}" for span in recorder.spans} == {TRACE}
    assert len([record for record in caplog.records if record.name.startswith("opentelemetry")]) == 1


@pytest.mark.parametrize("by_flag", [True, False])
async def test_spans_reach_a_collector_named_by_the_flag_or_by_opentelemetrys_variable(
    by_flag: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("OTEL_SERVICE_NAME", "chat")
    with Collector().running() as collector:
        if not by_flag:
            monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", collector.url)
        with tracing(collector.url if by_flag else "", os.environ) as outer:
            async with serve(outer=outer) as client:
                await client.complete(prompt="hi")
        assert [span.name for span in collector.spans] == ["queue or prefill", "POST /v1/completions"]
        ((path, request),) = collector.requests
    assert path == "/v1/traces"
    service = {one.key: one.value.string_value for one in request.resource_spans[0].resource.attributes}
    assert service["service.name"] == "chat"


async def test_a_collector_that_does_not_answer_holds_up_no_request(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """All requests are answered while an export hangs, with a queue that is full long before."""
    monkeypatch.setenv("OTEL_BSP_SCHEDULE_DELAY", "10")
    monkeypatch.setenv("OTEL_BSP_MAX_QUEUE_SIZE", "8")
    monkeypatch.setenv("OTEL_BSP_MAX_EXPORT_BATCH_SIZE", "4")
    with Collector().running() as collector:
        collector.answers.clear()
        with tracing(collector.url, os.environ) as outer:
            async with serve(outer=outer) as client:
                for _ in range(40):
                    await client.complete(prompt="hi")
                await until(lambda: collector.tries == 1)
                assert collector.requests == []
            collector.answers.set()
    assert 0 < len(collector.spans) < 80, "some were dropped"
    assert len([record for record in caplog.records if record.name.startswith("opentelemetry")]) == 1


async def test_a_collector_that_fails_is_in_the_log_once_a_minute(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("OTEL_BSP_SCHEDULE_DELAY", "1")
    with Collector(status=400).running() as collector, tracing(collector.url, os.environ) as outer:
        async with serve(outer=outer) as client:
            while collector.tries < 5:
                await client.complete(prompt="hi")
    lines = [record.getMessage() for record in caplog.records if record.name.startswith("opentelemetry")]
    assert len(lines) == 1
    assert "400" in lines[0]


@pytest.mark.parametrize(
    ("endpoint", "variables", "reason"),
    [
        ("grpc://collector:4317", {}, "must be a URL that begins with http:// or https://"),
        ("collector:4318", {}, "must be a URL that begins with http:// or https://"),
        ("http://collector:4317", {"OTEL_EXPORTER_OTLP_PROTOCOL": "grpc"}, "the protocol is grpc"),
        ("http://collector:4318", {"OTEL_BSP_MAX_QUEUE_SIZE": "-1"}, "max_queue_size must be a positive integer"),
    ],
)
def test_what_cannot_be_used_is_an_error_of_the_flag_and_a_line_for_a_variable(
    endpoint: str,
    variables: dict[str, str],
    reason: str,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(ConfigError, match=reason), tracing(endpoint, os.environ):
        pass
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_TRACES_ENDPOINT", endpoint)
    with tracing("", os.environ) as outer:
        assert outer == ()
    assert reason in caplog.text


def test_without_the_extra_the_flag_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delitem(sys.modules, "services.gateway.spans")
    for name in [name for name in sys.modules if name.split(".")[0] == "opentelemetry"]:
        monkeypatch.setitem(sys.modules, name, None)
    with pytest.raises(ConfigError, match=r"pip install 'quire-server\[tracing\]'"), tracing("http://c:4318", {}):
        pass
    with tracing("", {"OTEL_EXPORTER_OTLP_ENDPOINT": "http://c:4318"}) as outer:
        assert outer == ()


@pytest.mark.parametrize(
    "variables",
    [
        {},
        {"OTEL_EXPORTER_OTLP_ENDPOINT": "http://c:4318", "OTEL_TRACES_EXPORTER": "none"},
        {"OTEL_EXPORTER_OTLP_ENDPOINT": "http://c:4318", "OTEL_SDK_DISABLED": "true"},
    ],
)
def test_a_gateway_without_tracing_imports_nothing_of_it(variables: dict[str, str]) -> None:
    program = (
        "import sys, services.gateway.__main__ as main\n"
        f"with main.tracing('', {variables!r}) as outer: assert outer == ()\n"
        "assert not [name for name in sys.modules if name.startswith('opentelemetry')]\n"
        "assert 'services.gateway.spans' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", program], check=True, timeout=60)
