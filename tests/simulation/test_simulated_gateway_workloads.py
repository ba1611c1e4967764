"""Tests random workloads of a gateway and engines that die: each request gets what it gets alone.

A failure names its seed; `gateway_workloads.run(seed)` runs it again.
"""

from collections import Counter

import gateway_workloads
import pytest

WORKLOADS = 400
PARTS = 2


@pytest.mark.parametrize("part", range(PARTS))
def test_every_request_outlives_its_engine(part: int) -> None:
    for seed in range(part, WORKLOADS, PARTS):
        try:
            gateway_workloads.run(seed)
        except Exception as error:
            raise AssertionError(f"workload {seed}: {error!r}") from error


def test_workloads_reach_what_they_are_to_prove() -> None:
    """Engines are lost at every stage of a request, and each kind of fault and of end happens."""
    seen: Counter[str] = Counter()
    for seed in range(5400, 5700):
        seen += gateway_workloads.run(seed)
    assert set(seen) == {
        *("scheduler died", "all died", "worker died", "drained", "ended", "cut", "gateway given up", "away for long"),
        *("queued", "in prefill", "decoding", "at the last token", "forking"),
        *("with samples that have not started", "with results on the way", "while draining", "resumed"),
        *("drained between two samples", "at two engines"),
        *(
            "killed by a request",
            "died after the worker",
            "suspect resubmitted",
            "suspect with a death resubmitted",
            "poison found",
        ),
        *("reset", "not reset"),
        *("served", "refused", "too long", "left", "given up", "lost too often"),
    }
    rare = {name: count for name, count in seen.items() if count < 3}
    assert not rare


def test_the_same_seed_leads_to_the_same_events() -> None:
    for seed in range(6000, 6020):
        assert gateway_workloads.run(seed) == gateway_workloads.run(seed)
