"""Tests the order of requests, and how they share a step's token budget."""

from array import array
from random import Random

import pytest

from services.scheduler.core import Limits
from services.scheduler.core.policy import SortedSequences, budget_beside_streams, may_preempt, order_key, split_budget
from services.scheduler.core.sequence import Request, Sequence
from shared.protocol import Sampling


def _limits(policy: str, ageing: float = 0.0) -> Limits:
    return Limits(
        num_blocks=10,
        max_num_seqs=4,
        max_num_batched_tokens=16,
        max_model_len=100,
        policy=policy,  # type: ignore[arg-type]
        priority_ageing=ageing,
    )


def _sequence(limits: Limits, priority: int, arrival: float, serial: int) -> Sequence:
    request = Request(serial, 1, Sampling(max_tokens=1, seed=0), order_key(limits, priority, arrival, serial), priority)
    return request.start(0, array("i", [1]))


def test_without_priorities_the_arrival_decides_then_the_order_of_submission() -> None:
    limits = _limits("fcfs")
    assert order_key(limits, 0, 5.0, 2) < order_key(limits, 0, 6.0, 1)
    assert order_key(limits, 0, 5.0, 1) < order_key(limits, 0, 5.0, 2)


def test_strict_priority_comes_before_the_arrival() -> None:
    limits = _limits("priority")
    assert order_key(limits, -1, 99.0, 2) < order_key(limits, 0, 1.0, 1)


def test_ageing_is_worth_seconds_of_waiting() -> None:
    limits = _limits("priority", 10.0)
    assert order_key(limits, 1, 100.0, 1) < order_key(limits, 0, 110.5, 2)
    assert order_key(limits, 1, 100.0, 1) > order_key(limits, 0, 109.5, 2)


def test_only_the_more_urgent_preempts() -> None:
    limits = _limits("priority", 10.0)
    running, equal, urgent, late = (
        _sequence(limits, priority, arrival, serial)
        for serial, (priority, arrival) in enumerate([(1, 100.0), (1, 50.0), (0, 105.0), (0, 120.0)])
    )
    assert not may_preempt(limits, equal, running)
    assert may_preempt(limits, urgent, running)
    assert not may_preempt(limits, late, running), "it is behind, urgent or not"


def test_sorted_sequences_keep_the_order() -> None:
    limits, rng, ordered = _limits("priority"), Random(1), SortedSequences()
    all_of_them = [_sequence(limits, rng.randint(0, 3), rng.random(), serial) for serial in range(50)]
    for sequence in all_of_them:
        ordered.add(sequence)
    for sequence in all_of_them[::2]:
        ordered.remove(sequence)
    assert ordered.items == sorted(all_of_them[1::2], key=lambda sequence: sequence.key)
    assert len(ordered) == 25
    with pytest.raises(ValueError, match="not here"):
        ordered.remove(all_of_them[0])


@pytest.mark.parametrize(
    ("fitting", "in_line", "budget"),
    [
        (100, 1, 96),  # a multiple of 16
        (15, 1, 16),  # never less than a chunk
        (0, 0, 16),
        (20, 3, 48),  # a chunk for each
        (100, 3, 96),
        (0, 100, 128),  # as far as that makes them faster
        (500, 100, 496),
    ],
)
def test_budget_beside_streams(fitting: int, in_line: int, budget: int) -> None:
    assert budget_beside_streams(fitting, in_line) == budget


@pytest.mark.parametrize(
    ("budget", "demands", "grants"),
    [
        (256, [20_000], [256]),
        (256, [20_000, 40], [216, 40]),
        (256, [20_000, 20_000], [188, 68]),
        (256, [10, 20], [10, 20]),
        (20, [100, 100, 100], [16, 4, 0]),
        (1, [5, 5], [1, 0]),
        (64, [16, 16, 16, 16], [16, 16, 16, 16]),
        (5, [], []),
    ],
)
def test_split_budget(budget: int, demands: list[int], grants: list[int]) -> None:
    assert split_budget(budget, demands, 16) == grants


def test_splitting_a_budget_wastes_nothing_and_leaves_nobody_out_without_need() -> None:
    rng = Random(2)
    for _ in range(500):
        demands = [rng.randint(1, 200) for _ in range(rng.randint(1, 20))]
        budget = rng.randint(1, 400)
        grants = split_budget(budget, demands, 16)
        assert sum(grants) == min(budget, sum(demands))
        assert all(0 <= grant <= demand for grant, demand in zip(grants, demands, strict=True))
        if sum(min(demand, 16) for demand in demands) <= budget:
            assert all(grant >= min(demand, 16) for grant, demand in zip(grants, demands, strict=True))
