"""Tests that the dashboard's metrics are exported, and that Prometheus counts none of them twice."""

import json
import re
from pathlib import Path
from typing import Any

import yaml
from prometheus_client import generate_latest
from prometheus_client.parser import text_string_to_metric_families

from services.gateway.metrics import Metrics
from shared.metrics import EngineCollector, registry
from shared.protocol import Snapshot

ROOT = Path(__file__).resolve().parents[2]
DASHBOARD: dict[str, Any] = json.loads((ROOT / "deploy/grafana/dashboards/quire.json").read_text())
PROMETHEUS: dict[str, Any] = yaml.safe_load((ROOT / "deploy/prometheus.yml").read_text())
DATASOURCE: dict[str, Any] = yaml.safe_load(
    (ROOT / "deploy/grafana/provisioning/datasources/prometheus.yml").read_text()
)


def samples(exposition: bytes) -> set[str]:
    """Return the names of Quire's metrics in an exposition, as queries write them."""
    families = text_string_to_metric_families(exposition.decode())
    names = {sample.name for family in families for sample in family.samples}
    return {name for name in names if name.startswith(("vllm:", "quire:"))}


def of_scheduler() -> set[str]:
    collector = EngineCollector(lambda: "model", lambda: {"0": Snapshot()})
    return samples(generate_latest(registry(collector)))


def of_gateway() -> set[str]:
    metrics = Metrics("model", lambda: {"0": Snapshot()})
    metrics.engine("0")
    metrics.count_response("/v1/models", 200)
    return samples(metrics.render()[0])


def queries() -> list[str]:
    panels = [panel for panel in DASHBOARD["panels"] if panel["type"] != "row"]
    return [target["expr"] for panel in panels for target in panel["targets"]]


def test_every_metric_of_the_dashboard_is_exported() -> None:
    named = {name for query in queries() for name in re.findall(r"(?:vllm|quire):\w+", query)}
    assert len(named) > 10
    assert named <= of_scheduler() | of_gateway()


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
    ):
        assert name in text


def test_metrics_of_engines_are_scraped_from_the_scheduler_alone() -> None:
    jobs = {job["job_name"]: job for job in PROMETHEUS["scrape_configs"]}
    (rule,) = jobs["gateway"]["metric_relabel_configs"]
    assert rule["action"] == "drop"
    dropped = {name for name in of_gateway() if re.fullmatch(rule["regex"], name)}
    assert dropped == of_scheduler()
    assert len(dropped) > 20


def test_panels_use_the_data_source_that_is_provisioned() -> None:
    uids = {panel["datasource"]["uid"] for panel in DASHBOARD["panels"] if panel["type"] != "row"}
    assert uids == {source["uid"] for source in DATASOURCE["datasources"]}
