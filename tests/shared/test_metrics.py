"""Tests the metrics that are computed from an engine's snapshot."""

import time

import pytest
from prometheus_client import generate_latest
from prometheus_client.parser import text_string_to_metric_families

from shared.metrics import CACHE_LABELS, LORA_LABELS, EngineCollector, registry
from shared.protocol import STEP_TOKEN_BUCKETS, Snapshot

SNAPSHOT = Snapshot(
    running=3, waiting=2, blocks=100, blocks_free=75, preemptions=7, finished_abort=4, generation_tokens=9
)


def samples(snapshots: dict[str, Snapshot]) -> dict[tuple[str, str, str], float]:
    text = generate_latest(registry(EngineCollector(lambda: "smol", lambda: snapshots))).decode()
    own = ("finished_reason", "reason", "source", "le", *CACHE_LABELS, *LORA_LABELS)
    return {
        (
            sample.name,
            sample.labels.get("engine", ""),
            ",".join(sample.labels[name] for name in own if name in sample.labels),
        ): sample.value
        for family in text_string_to_metric_families(text)
        for sample in family.samples
    }


def test_gauges_and_counters_of_each_engine() -> None:
    metrics = samples({"0": SNAPSHOT, "1": Snapshot(running=1, preemptions=5)})
    assert metrics["vllm:num_requests_running", "0", ""] == 3
    assert metrics["vllm:num_requests_waiting", "0", ""] == 2
    assert metrics["vllm:kv_cache_usage_perc", "0", ""] == 0.25
    assert metrics["vllm:num_preemptions_total", "0", ""] == 7
    assert metrics["vllm:generation_tokens_total", "0", ""] == 9
    assert metrics["quire:sequences_finished_total", "0", "abort"] == 4
    assert metrics["quire:sequences_finished_total", "0", "stop"] == 0
    assert metrics["vllm:num_requests_running", "1", ""] == 1
    assert metrics["vllm:num_preemptions_total", "1", ""] == 5


def test_an_engine_without_blocks_uses_none() -> None:
    assert samples({"0": Snapshot()})["vllm:kv_cache_usage_perc", "0", ""] == 0


def test_waste_is_what_held_blocks_do_not_store() -> None:
    held = Snapshot(blocks=10, blocks_free=6, block_size=16, tokens_held=48)
    assert samples({"0": held})["quire:kv_waste_perc", "0", ""] == 0.25
    idle = Snapshot(blocks=10, blocks_free=10, block_size=16)
    assert samples({"0": idle})["quire:kv_waste_perc", "0", ""] == 0


def test_every_field_of_a_snapshot_is_exported(monkeypatch: pytest.MonkeyPatch) -> None:
    """Setting any single field changes the exported metrics."""
    monkeypatch.setattr(time, "time", lambda: 7.0)  # a value of one of them
    base = {"blocks": 10, "block_size": 8, "max_loras": 1}
    zero = samples({"0": Snapshot(**base)})
    values = {"step_tokens": [5], "adapters_running": ["a"], "adapters_waiting": ["a"]}
    for field in Snapshot.__struct_fields__:
        changed = samples({"0": Snapshot(**base | {field: values.get(field, 5)})})
        engine = {key for key in changed if key[1] == "0" and zero.get(key) != changed[key]}
        assert engine, field


def test_metrics_of_vllm_and_its_guides_have_their_names() -> None:
    """API-04: they have vLLM's labels and buckets, and the right values."""
    counts = [0] * (len(STEP_TOKEN_BUCKETS) + 1)
    counts[0], counts[2], counts[-1] = 4, 3, 1
    snapshot = Snapshot(
        waiting=5, waiting_deferred=2, blocks=100, blocks_free=75, block_size=16, prefix_caching=True,
        max_model_len=640, generation_tokens=9, tokens_per_second=2.5, prompt_tokens=30, prompt_tokens_cached=12,
        step_tokens=counts, step_tokens_sum=20_000, rejected_by_requests=3, rejected_by_tokens=1,
        max_loras=4, adapters_running=["a", "c"], adapters_waiting=["b"],
    )  # fmt: skip
    metrics = samples({"0": snapshot})
    assert metrics["vllm:request_throughput_tok_per_second", "0", ""] == 2.5
    assert metrics["vllm:generation_token_count", "0", ""] == 9
    assert metrics["vllm:gpu_cache_usage", "0", ""] == 0.25
    assert metrics["vllm:num_requests_waiting_by_reason", "0", "capacity"] == 3
    assert metrics["vllm:num_requests_waiting_by_reason", "0", "deferred"] == 2
    assert metrics["vllm:prompt_tokens_by_source_total", "0", "local_compute"] == 18
    assert metrics["vllm:prompt_tokens_by_source_total", "0", "local_cache_hit"] == 12
    assert metrics["vllm:prompt_tokens_cached_total", "0", ""] == 12
    assert metrics["vllm:cache_config_info", "0", "16,100,True,1600,2.50"] == 1
    assert metrics["vllm:lora_requests_info", "0", "4,b,a,c"] == pytest.approx(time.time(), abs=60)
    assert metrics["vllm:admission_rejections_total", "0", "max_num_queued_reqs"] == 3
    assert metrics["vllm:admission_rejections_total", "0", "max_num_queued_tokens"] == 1
    buckets = [
        metrics["vllm:iteration_tokens_total_bucket", "0", le] for le in ("1.0", "8.0", "16.0", "16384.0", "+Inf")
    ]
    assert buckets == [4, 4, 7, 7, 8]
    assert metrics["vllm:iteration_tokens_total_sum", "0", ""] == 20_000
    assert metrics["vllm:iteration_tokens_total_count", "0", ""] == 8


def test_scrapes_follow_the_snapshots() -> None:
    snapshots: dict[str, Snapshot] = {}
    assert not [key for key in samples(snapshots) if key[1]]
    snapshots["a"] = SNAPSHOT
    assert samples(snapshots)["vllm:num_requests_running", "a", ""] == 3
