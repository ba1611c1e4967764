"""Tests that the dashboard's metrics are exported, and that Prometheus counts none of them twice."""

import json
import re
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from threading import Thread
from typing import Any
from urllib.parse import unquote

import pytest
import yaml
from prometheus_client import generate_latest
from prometheus_client.parser import text_string_to_metric_families

from deploy import dashboard_check
from services.gateway.metrics import EngineLosses, Metrics
from services.scheduler.exporter import WorkerMetrics
from shared.metrics import EngineCollector, registry
from shared.protocol import Snapshot

ROOT = Path(__file__).resolve().parents[2]
DASHBOARD: dict[str, Any] = json.loads((ROOT / "deploy/grafana/dashboards/quire.json").read_text())
PROMETHEUS: dict[str, Any] = yaml.safe_load((ROOT / "deploy/prometheus.yml").read_text())
DATASOURCE: dict[str, Any] = yaml.safe_load(
    (ROOT / "deploy/grafana/provisioning/datasources/prometheus.yml").read_text()
)

SNAPSHOT = Snapshot(max_loras=1)  # with it all metrics are there


def samples(exposition: bytes) -> set[str]:
    """Return the names of Quire's metrics in an exposition, as queries write them."""
    families = text_string_to_metric_families(exposition.decode())
    names = {sample.name for family in families for sample in family.samples}
    return {name for name in names if name.startswith(("vllm:", "quire:"))}


def of_scheduler() -> set[str]:
    collector = EngineCollector(lambda: "model", lambda: {"0": SNAPSHOT})
    return samples(generate_latest(registry(collector)))


def of_scheduler_alone() -> set[str]:
    """Return the metrics of a scheduler that gateways do not have."""
    return samples(generate_latest(registry(*WorkerMetrics("0").all)))


def of_gateway() -> set[str]:
    losses = EngineLosses()
    losses.init_labels("0")
    metrics = Metrics("model", lambda: {"0": SNAPSHOT}, losses.all)
    metrics.engine("0")
    metrics.count_response("/v1/models", 200)
    return samples(metrics.render()[0])


def queries() -> list[str]:
    panels = [panel for panel in DASHBOARD["panels"] if panel["type"] != "row"]
    return [target["expr"] for panel in panels for target in panel["targets"]]


def test_every_metric_of_the_dashboard_is_exported() -> None:
    named = {name for query in queries() for name in re.findall(r"(?:vllm|quire):\w+", query)}
    assert len(named) > 10
    assert named <= of_scheduler() | of_scheduler_alone() | of_gateway()


def test_the_dashboard_shows_what_operators_ask_for() -> None:
    text = " ".join(queries())
    for name in (
        "num_requests_running",
        "num_requests_waiting",
        "kv_cache_usage_perc",
        "generation_tokens_total",
        "time_to_first_token_seconds_bucket",
        "inter_token_latency_seconds_bucket",
        "e2e_request_latency_seconds_bucket",
        "requests_refused_total",
        "prefix_cache_hits_total",
        "num_preemptions_total",
        "http_responses_total",
        "haproxy_server_status",
        "request_queue_time_seconds_bucket",
        "request_prefill_time_seconds_bucket",
        "request_inference_time_seconds_bucket",
        "iteration_tokens_total_bucket",
        "num_requests_waiting_by_reason",
        "request_throughput_tok_per_second",
        "prompt_tokens_by_source_total",
        "request_num_preemptions_bucket",
        "cache_config_info",
        "request_decode_time_seconds_bucket",
        "worker_losses_total",
        "engine_detection_seconds_count",
        "engine_detection_seconds_bucket",
        "worker_detection_seconds_bucket",
        "engine_restarts_total",
        "epochs_total",
        "resumed_requests_total",
        "inexact_resumes_total",
        "request_recovery_seconds_bucket",
        "worker_recovery_seconds_bucket",
        "lora_requests_info",
    ):
        assert name in text


def test_metrics_of_engines_are_scraped_from_the_scheduler_alone() -> None:
    jobs = {job["job_name"]: job for job in PROMETHEUS["scrape_configs"]}
    (rule,) = jobs["gateway"]["metric_relabel_configs"]
    assert rule["action"] == "drop"
    dropped = {name for name in of_gateway() if re.fullmatch(rule["regex"], name)}
    assert dropped == of_scheduler()
    assert not of_gateway() & of_scheduler_alone()
    assert len(dropped) > 20


def test_panels_use_the_data_source_that_is_provisioned() -> None:
    uids = {panel["datasource"]["uid"] for panel in DASHBOARD["panels"] if panel["type"] != "row"}
    assert uids == {source["uid"] for source in DATASOURCE["datasources"]}


def test_panels_do_not_cover_each_other() -> None:
    cells = [
        (x, y)
        for panel in DASHBOARD["panels"]
        for x in range(panel["gridPos"]["x"], panel["gridPos"]["x"] + panel["gridPos"]["w"])
        for y in range(panel["gridPos"]["y"], panel["gridPos"]["y"] + panel["gridPos"]["h"])
    ]
    assert len(cells) == len(set(cells))
    assert max(x for x, _ in cells) < 24
    ids = [panel["id"] for panel in DASHBOARD["panels"]]
    assert len(ids) == len(set(ids))


class FakePrometheus:
    """Answers every query with `number`, those of losses with `of_losses`, and those of adapters with nothing.

    None: there are no such series.
    """

    def __init__(self, number: str | None, of_losses: str | None) -> None:
        def answer(query: str) -> bytes:
            value = of_losses if re.search("_(detection|recovery)_seconds_bucket", query) else number
            value = None if "lora_requests_info" in query else value
            result = [] if value is None else [{"metric": {}, "value": [0, value]}]
            return json.dumps({"data": {"result": result}}).encode()

        class Handler(BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                self.send_response(200)
                self.end_headers()
                self.wfile.write(answer(unquote(self.path)))

            def log_message(self, *_: object) -> None:
                """Say nothing."""

        self._server = HTTPServer(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self._server.server_port}"

    def __enter__(self) -> str:
        Thread(target=self._server.serve_forever, daemon=True).start()
        return self.url

    def __exit__(self, *_: object) -> None:
        self._server.shutdown()
        self._server.server_close()


@pytest.mark.parametrize(
    ("number", "of_losses", "status"),
    [("1", "2", 0), ("1", "NaN", 0), ("1", None, 1), ("NaN", "2", 1), (None, "2", 1)],
)
def test_the_check_of_the_dashboard_finds_empty_panels_but_expects_no_losses(
    number: str | None, of_losses: str | None, status: int
) -> None:
    with FakePrometheus(number, of_losses) as url:
        assert dashboard_check.main(url) == status
