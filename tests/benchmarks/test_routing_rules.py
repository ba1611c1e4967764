"""Tests that the gateway's choice of engines serves its purpose, in virtual time: more prefix hits, sooner tokens."""

from benchmarks.routing_rules import Simulation, Workload
from services.gateway.routing import Router

CHATS = Workload(engines=2, users=8, systems=4, system=200, turns=3, question=40, answer=20, think=2.0, requests=100)


def test_chats_hit_the_cache_more_often_and_begin_sooner_than_by_load_alone() -> None:
    hits, mean, median, high = Simulation(CHATS, Router(), 1).run()
    for policy in ("least_loaded", "round_robin"):
        other_hits, other_mean, other_median, other_high = Simulation(CHATS, Router(policy), 1).run()
        assert hits > other_hits + 0.05
        assert mean < 0.9 * other_mean
        assert median <= other_median
        assert high < other_high


def test_the_same_seed_leads_to_the_same_figures() -> None:
    assert Simulation(CHATS, Router(), 2).run() == Simulation(CHATS, Router(), 2).run()
