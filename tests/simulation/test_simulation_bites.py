"""Faults seeded into the real core: the simulation must find each of them, or it proves nothing.

A mutant is a function of the core with some of its text replaced. One that survives is a gap in the simulation.
"""

import importlib
import inspect
import textwrap
from collections.abc import Iterator
from contextlib import contextmanager

import pytest
import workloads

CORE = "services.scheduler.core"
ENOUGH = 600
"""Workloads in which a mutant must be found; most are within the first ten."""

MUTANTS: dict[str, list[tuple[str, str, str]]] = {
    "a share is not counted": [("blocks:BlockPool.share", "self.refs[block] += 1", "self.refs[block] = 1")],
    "a block has another key than its prefix": [
        ("prefix:PrefixIndex.publish", "(parent, tokens.tobytes())", "(0, tokens.tobytes())"),
        ("prefix:PrefixIndex.walk", "self._entries.get((serial, ", "self._entries.get((0, "),
    ],
    "blocks are published when planned": [
        ("memory:Memory.publish", "<= sequence.computed", "<= min(sequence.planned, len(sequence.tokens))"),
    ],
    "blocks are published one token early": [
        ("memory:Memory.publish", "<= sequence.computed", "<= sequence.computed + 1"),
        ("settlement:settle", "computed >= sequence.next_full", "computed + 1 >= sequence.next_full"),
    ],
    "a table is freed with plans in flight": [("roster:Roster._stop", "if not sequence.in_flight:", "if True:")],
    "a shared block is not copied": [("memory:Memory.extend", "elif self.pool.refs", "elif False and self.pool.refs")],
    "a fork leaves the parent's room": [("memory:Memory.fork", "parent.room = child.room", "child.room")],
    "a fork shares the list itself": [("memory:Memory.fork", "list(parent.blocks)", "parent.blocks")],
    "the first is the victim": [
        (
            "planner:Planner._extend",
            "roster.preempt(roster.running.items[-1])",
            "roster.preempt(roster.running.items[0])",
        ),
    ],
    "preemption forgets the output": [
        ("sequence:Sequence.rewind", "self.blocks = []", "self.blocks = []; del self.tokens[self.prompt_len :]"),
    ],
    "tokens sampled while draining are lost": [
        ("settlement:settle", "if sequence.finish_reason is None:", "if sequence.state is State.RUNNING:"),
    ],
    "a stop is seen one token late": [
        (
            "settlement:_advance",
            "if tokens[0] in sequence.stops",
            "if output_len and sequence.tokens[-2] in sequence.stops",
        ),
    ],
    "the end of the output is not seen in time": [
        ("planner:Planner._continue", "position < sequence.end and", ""),
    ],
    "stray tokens are told": [("settlement:settle", "if sequence.finish_reason is None:", "if True:")],
    "results of another epoch count": [("scheduler:Scheduler.commit", "result.epoch != self._epoch or", "")],
    "results of another step count": [
        ("scheduler:Scheduler.commit", " or result.step != self._flights[0].step", ""),
    ],
    "a duplicate replaces what is published": [("prefix:PrefixIndex.publish", "if entry is None:", "if True:")],
    "the source of a copy is not pinned": [("blocks:BlockPool.pin", "self._free.pop(block, None)", "pass")],
    "a source comes free too early": [
        ("scheduler:Scheduler.plan", "return plan", "self._memory.unpin(self._flights[-1].pins)\n    return plan"),
        ("settlement:settle", "memory.unpin(flight.pins)", "pass"),
    ],
    "a child samples with its parent's index": [("draft:Draft.fork", "child.sample)", "parent.sample)")],
    "a slot is not released": [("roster:Roster._leave", "self.released.append(sequence.slot)", "pass")],
    "a taken block stays in the index": [("memory:Memory._take", "self.index.forget(block)", "pass")],
    "hits are taken from the free list too late": [
        (
            "memory:Memory.place",
            "pool, size = ",
            "fresh = list(self._take() for _ in range(claim.fresh)); pool, size = ",
        ),
        ("memory:Memory.place", "[self._take() for _ in range(claim.fresh)]", "fresh"),
    ],
    "a full hit leaves nothing to compute": [
        ("memory:Memory.survey", "hits.pop() if len(hits) * size == len(tokens) else None", "None"),
    ],
    "a full hit is written in place": [
        ("memory:Memory.survey", "hits.pop() if len(hits) * size == len(tokens) else None", "None"),
        (
            "memory:Memory.place",
            "found = len(claim.hits) * size",
            "found = min(len(claim.hits) * size, sequence.known - 1)",
        ),
    ],
    "scores are told again after a preemption": [
        ("settlement:_unsent", "scores[max(sequence.prompt_logprobs_sent - row.start, 0) :]", "scores"),
    ],
    "a prompt to be scored takes hits": [("memory:Memory.may_hit", "and sequence.sampling.prompt_logprobs < 0", "")],
    "later requests pass the first": [("planner:Planner._next_in_line", "waiting.items[0]", "waiting.items[-1]")],
    "a displaced sequence that is back gets two rows": [
        ("planner:Planner.draw", "sorted(running, key", "sorted(stretches, key"),
    ],
    "admission takes blocks that are not there": [
        ("planner:Planner._find_blocks", "claim.need + spare <= memory.free", "claim.fresh <= memory.free"),
    ],
    "a worker's death leaves plans in flight": [
        ("scheduler:Scheduler._forget_worker", "self._flights.clear()", "pass")
    ],
    "a worker's death leaves the index": [
        ("memory:Memory.reset", "self.index = ", "self.index = vars(self).get('index') or "),
    ],
    "one death condemns": [("quarantine:Quarantine.accuse", ">= STRIKES", ">= 1")],
    "a trial has company": [("planner:Planner._next_in_line", "if self._quarantine.active:", "if False:")],
    "a trial begins in company": [("scheduler:Scheduler._begin_trial", "self._roster.preempt(sequence)", "pass")],
    "suspects are never separated": [
        ("quarantine:Quarantine.accuse", "(len(suspects) + 1) // 2", "len(suspects)"),
    ],
    "aborting the parent forgets its other samples": [
        ("roster:Roster._strike_off", "self.enqueue(heir)", "pass"),
    ],
    "an abort is told twice": [("roster:Roster._strike_off", "del request.live[sequence.sample]", "pass")],
}


@pytest.mark.parametrize("name", MUTANTS)
def test_simulation_finds_the_mutant(name: str) -> None:
    with mutated(MUTANTS[name]):
        assert any(_fails(seed) for seed in range(ENOUGH)), f"not found: {name}"


def _fails(seed: int) -> bool:
    try:
        workloads.run(seed)
    except Exception:
        return True
    return False


@contextmanager
def mutated(changes: list[tuple[str, str, str]]) -> Iterator[None]:
    """The core with the text of some of its functions changed."""
    with pytest.MonkeyPatch.context() as patch:
        texts: dict[str, str] = {}
        for where, old, new in changes:
            text = texts.get(where) or _source(where)
            assert text.count(old) == 1, f"{where} has changed: {old!r}"
            texts[where] = text.replace(old, new)
        for where, text in texts.items():
            _replace(patch, where, text)
        yield


def _source(where: str) -> str:
    module, _, path = where.partition(":")
    found = importlib.import_module(f"{CORE}.{module}")
    for name in path.split("."):
        found = getattr(found, name)
    return textwrap.dedent(inspect.getsource(found))


def _replace(patch: pytest.MonkeyPatch, where: str, text: str) -> None:
    module_name, _, path = where.partition(":")
    module = importlib.import_module(f"{CORE}.{module_name}")
    owner, _, name = path.rpartition(".")
    made: dict[str, object] = {}
    exec(compile(text, where, "exec"), vars(module), made)
    if owner:
        patch.setattr(getattr(module, owner), name, made[name])
        return
    patch.setattr(module, name, made[name])
    if (scheduler := importlib.import_module(f"{CORE}.scheduler")) and hasattr(scheduler, name):
        patch.setattr(scheduler, name, made[name])  # which imported the function by its name
