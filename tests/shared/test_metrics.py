"""The families that an engine's snapshot turns into."""

from prometheus_client import generate_latest
from prometheus_client.parser import text_string_to_metric_families

from shared.metrics import EngineCollector, registry
from shared.protocol import Snapshot

SNAPSHOT = Snapshot(
    running=3, waiting=2, blocks=100, blocks_free=75, preemptions=7, finished_abort=4, generation_tokens=9
)


def samples(snapshots: dict[str, Snapshot]) -> dict[tuple[str, str, str], float]:
    text = generate_latest(registry(EngineCollector(lambda: "smol", lambda: snapshots))).decode()
    return {
        (sample.name, sample.labels.get("engine", ""), sample.labels.get("finished_reason", "")): sample.value
        for family in text_string_to_metric_families(text)
        for sample in family.samples
    }


def test_gauges_and_counters_of_each_engine() -> None:
    found = samples({"0": SNAPSHOT, "1": Snapshot(running=1, preemptions=5)})
    assert found["vllm:num_requests_running", "0", ""] == 3
    assert found["vllm:num_requests_waiting", "0", ""] == 2
    assert found["vllm:kv_cache_usage_perc", "0", ""] == 0.25
    assert found["vllm:num_preemptions_total", "0", ""] == 7
    assert found["vllm:generation_tokens_total", "0", ""] == 9
    assert found["quire:sequences_finished_total", "0", "abort"] == 4
    assert found["quire:sequences_finished_total", "0", "stop"] == 0
    assert found["vllm:num_requests_running", "1", ""] == 1
    assert found["vllm:num_preemptions_total", "1", ""] == 5


def test_an_engine_without_blocks_uses_none() -> None:
    assert samples({"0": Snapshot()})["vllm:kv_cache_usage_perc", "0", ""] == 0


def test_waste_is_what_held_blocks_do_not_store() -> None:
    held = Snapshot(blocks=10, blocks_free=6, block_size=16, tokens_held=48)
    assert samples({"0": held})["quire:kv_waste_perc", "0", ""] == 0.25
    idle = Snapshot(blocks=10, blocks_free=10, block_size=16)
    assert samples({"0": idle})["quire:kv_waste_perc", "0", ""] == 0


def test_every_field_of_a_snapshot_is_exported() -> None:
    """Each field, set alone, changes the exposition."""
    zero = samples({"0": Snapshot(blocks=10)})
    for field in Snapshot.__struct_fields__:
        changed = samples({"0": Snapshot(**{"blocks": 10, field: 5})})
        engine = {key for key in zero if key[1] == "0" and zero[key] != changed[key]}
        assert engine, field


def test_scrapes_follow_the_snapshots() -> None:
    snapshots: dict[str, Snapshot] = {}
    assert not [key for key in samples(snapshots) if key[1]]
    snapshots["a"] = SNAPSHOT
    assert samples(snapshots)["vllm:num_requests_running", "a", ""] == 3
