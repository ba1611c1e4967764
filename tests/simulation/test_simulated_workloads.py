"""Tests thousands of random workloads on the real core: each request gets the tokens that it gets alone.

A failure names its seed; `workloads.run(seed)` runs it again.
"""

from collections import Counter

import msgspec
import pytest
import workloads

from services.scheduler.core.counters import Counters
from shared.protocol import Snapshot

WORKLOADS = 2400
PARTS = 8

GAUGES = {
    "running",
    "waiting",
    "waiting_deferred",
    "waiting_tokens",
    "blocks",
    "blocks_free",
    "blocks_cached",
    "block_size",
    "block_bytes",
    "tokens_held",
    "in_flight",
    "prefix_caching",
    "max_model_len",
    "max_loras",
    "adapters_running",
    "adapters_waiting",
    "tokens_per_second",
    "swapped",
    "host_blocks",
    "host_blocks_free",
    "host_blocks_cached",
}
"""The fields of a snapshot that are no counters."""


@pytest.mark.parametrize("part", range(PARTS))
def test_every_request_gives_what_it_gives_alone(part: int) -> None:
    for seed in range(part, WORKLOADS, PARTS):
        try:
            workloads.run(seed)
        except Exception as error:
            raise AssertionError(f"workload {seed}: {error}") from error


@pytest.mark.parametrize("seed", [209, 961, 1429, 24209, 25202, 25798])
def test_workloads_that_once_went_wrong(seed: int) -> None:
    workloads.run(seed, deep=False)


def test_workloads_reach_what_they_are_to_prove() -> None:
    seen: Counter[str] = Counter()
    counted: set[str] = set()
    for seed in range(5000, 5300):
        engine = workloads.run(seed)
        state = engine.core.snapshot()
        seen += engine.events
        counted |= {name for name in Counters.__struct_fields__ if getattr(state, name)}
        seen += Counter(
            {
                "preemptions": state.preemptions,
                "hits": state.prefix_hits,
                "hits in host memory": state.host_prefix_hits,
                "swaps of victims": state.preemptions_swapped,
                "stopped": state.finished_stop,
                "aborted": state.finished_abort,
                "condemned": state.finished_error,
                "losses": state.worker_losses,
                "refused": state.refused,
                "scored": sum(bool(client.scores) for client in engine.clients.values()),
            }
        )
    rare = {name: count for name, count in seen.items() if count < 20}
    assert len(seen) == 32
    assert not rare
    uncounted = set(Counters.__struct_fields__) - counted
    assert uncounted == {"rejected_by_tokens"}, "no workload bounds the queue in tokens; all else happens"


def test_every_field_of_a_snapshot_is_a_counter_or_a_gauge() -> None:
    """A counter that is not in `Counters` would stay 0."""
    counters = {field.name for field in msgspec.structs.fields(Counters)}
    assert counters | GAUGES == set(Snapshot.__struct_fields__)
    assert not counters & GAUGES


def test_the_same_inputs_lead_to_the_same_plans() -> None:
    for seed in range(6000, 6050):
        assert workloads.run(seed).plans == workloads.run(seed).plans
