"""Tests the scheduler's rule of sharing a step with streams, in virtual time: what it costs and gains under load."""

import statistics
from unittest.mock import patch

import pytest

from benchmarks.step_rules import PLANNER, RULES, Costs, Seen, simulate

LARGE = Costs(step=0.030, row=0.0021, token=0.0033)  # a billion weights on two cores


def _run(clients: int, rule: str = "") -> Seen:
    bounded, budget = RULES[rule or "a chunk for each in line, as it is"]
    with patch(PLANNER, budget):
        return simulate(LARGE, 0.1 if bounded else 0.0, clients, 128, 64)


@pytest.mark.parametrize(("clients", "first"), [(4, 0.8), (8, 1.01), (32, 1.05)])
def test_streams_wait_less_and_first_tokens_hardly_wait_longer_than_without_a_bound(clients: int, first: float) -> None:
    seen, unbounded = _run(clients), _run(clients, "no bound")
    assert max(seen.gaps) < 0.6 * max(unbounded.gaps)
    assert statistics.median(seen.firsts) < first * statistics.median(unbounded.firsts)
    assert seen.rate > 0.98 * unbounded.rate


def test_few_clients_hardly_notice_prompts() -> None:
    assert max(_run(3).gaps) < 0.13


def test_a_bound_that_always_holds_would_let_prompts_wait() -> None:
    seen, strict = _run(32), _run(32, "the bound alone")
    assert sum(seen.firsts) < 0.6 * sum(strict.firsts)
    assert seen.rate > 0.98 * strict.rate


def test_the_same_costs_lead_to_the_same_figures() -> None:
    assert _run(4) == _run(4)
