"""Tests that the simulation finds bugs: each mutant is the real core with one, and all must be found.

A mutant is a function of the core with some of its text replaced. One that survives is a gap in the simulation.
"""

import pytest
import workloads
from mutants import CORE, mutated
from simulated_worker import SimulatedWorker

ENOUGH = 600
"""Workloads in which a mutant must be found; most are within the first ten."""

MUTANTS: dict[str, list[tuple[str, str, str]]] = {
    "a share is not counted": [("blocks:BlockPool.share", "self.refs[block] += 1", "self.refs[block] = 1")],
    "a block has another key than its prefix": [
        ("prefix:PrefixIndex.publish", "(parent, tokens.tobytes())", "(0, tokens.tobytes())"),
        ("prefix:PrefixIndex.match_prefix", "self._entries.get((node, ", "self._entries.get((0, "),
    ],
    "blocks are published when planned": [
        (
            "block_manager:BlockManager.publish",
            "<= sequence.progress.num_computed",
            "<= min(sequence.progress.num_scheduled, len(sequence.tokens))",
        ),
    ],
    "blocks are published one token early": [
        (
            "block_manager:BlockManager.publish",
            "<= sequence.progress.num_computed",
            "<= sequence.progress.num_computed + 1",
        ),
        ("commit:commit", "end >= sequence.table.publish_at", "end + 1 >= sequence.table.publish_at"),
    ],
    "a table is freed with plans in flight": [
        ("queues:Queues._stop", "if not sequence.progress.in_flight:", "if True:")
    ],
    "a shared block is not copied": [
        ("block_manager:BlockManager.extend", "elif self.pool.refs", "elif False and self.pool.refs")
    ],
    "a fork leaves the parent's last block writable": [
        ("block_manager:BlockManager.fork", "parent.table.num_writable = child.table", "child.table")
    ],
    "a fork shares the list itself": [
        ("block_manager:BlockManager.fork", "list(parent.table.blocks)", "parent.table.blocks")
    ],
    "the first is the victim": [
        (
            "planner:Planner._extend",
            "queues.preempt(queues.running.items[-1])",
            "queues.preempt(queues.running.items[0])",
        ),
    ],
    "a pipeline does not wait for a token": [
        ("planner:Planner._continue_outputs", "position == len(sequence.tokens) or ", ""),
    ],
    "the first stage does not hear what was sampled": [
        ("planner:Planner._continue_outputs", "builder.send_sampled(ready)", "pass"),
    ],
    "the first stage hears a token again": [
        ("plan_builder:PlanBuilder.send_sampled", "== progress.num_sent", ">= sequence.prompt_len"),
    ],
    "the first stage hears of one token of each": [
        ("plan_builder:PlanBuilder.send_sampled", "progress.num_sent += 1", "pass")
    ],
    "forks hear what their parent heard": [
        ("sequence:SequenceProgress.fork_from", "self.num_sent = parent.num_sent", "self.num_sent = parent.num_tokens"),
    ],
    "a resumed sequence hears its tokens again": [
        ("sequence:SequenceProgress.rewind", "self.num_tokens = self.num_sent = ", "self.num_tokens = "),
    ],
    "one plan takes all streams of a pipeline": [
        ("planner:Planner._continue_outputs", " or len(ready) == share", ""),
    ],
    "streams of a pipeline wait for prompts of any length": [
        ("planner:Planner._budget", " + builder.num_deferred", "")
    ],
    "preemption forgets the output": [
        ("sequence:Sequence.rewind", "self.slot = -1", "self.slot = -1; del self.tokens[self.prompt_len :]"),
    ],
    "tokens sampled while stopping are lost": [
        ("commit:commit", "if sequence.finish_reason is None:", "if sequence not in queues.stopping:"),
    ],
    "a stop is seen one token late": [
        (
            "sequence:Sequence.append_token",
            "if token in self.stop_token_ids",
            "if self.output_len > 1 and self.tokens[-2] in self.stop_token_ids",
        ),
    ],
    "the end of the output is not seen in time": [
        ("planner:Planner._continue_outputs", "position >= progress.max_num_computed", "False"),
    ],
    "stray tokens are sent": [("commit:commit", "if sequence.finish_reason is None:", "if True:")],
    "results of another epoch count": [("scheduler:Scheduler.commit", "result.epoch != self._epoch or", "")],
    "results of another step count": [
        ("scheduler:Scheduler.commit", " or result.step != self._in_flight[0].step", ""),
    ],
    "a duplicate replaces what is published": [("prefix:PrefixIndex.publish", "if entry is None:", "if True:")],
    "the source of a copy is not pinned": [("blocks:BlockPool.pin", "self._free.pop(block, None)", "pass")],
    "a source comes free too early": [
        (
            "scheduler:Scheduler.plan",
            "return plan",
            "self._block_manager.unpin(self._in_flight[-1].pinned_blocks, [])\n    return plan",
        ),
        ("commit:commit", "unpin(plan.pinned_blocks, ", "unpin([], "),
    ],
    "a child samples with its parent's index": [("plan_builder:PlanBuilder.fork", "child.sample)", "parent.sample)")],
    "a slot is not released": [("queues:Queues._release", "self.released_slots.append(sequence.slot)", "pass")],
    "a taken block stays in the index": [
        ("block_manager:BlockManager._take", "self.index.forget(block)", "self.index.content(block)")
    ],
    "hits are taken from the free list too late": [
        (
            "block_manager:BlockManager.allocate",
            "pool, size, table = ",
            "new = list(self._take() for _ in range(allocation.num_new)); pool, size, table = ",
        ),
        ("block_manager:BlockManager.allocate", "[self._take() for _ in range(allocation.num_new)]", "new"),
    ],
    "a full hit leaves nothing to compute": [
        (
            "block_manager:BlockManager.match_prefix",
            "min((len(hits) + len(host_blocks)) * size, len(tokens) - 1)",
            "(len(hits) + len(host_blocks)) * size",
        ),
    ],
    "a full hit is written in place": [
        ("block_manager:BlockManager.match_prefix", "hits.pop() if len(hits) * size > num_cached else None", "None"),
    ],
    "scores are sent again after a preemption": [
        (
            "sequence:SequenceStats.take_unsent",
            "logprobs[max(self.num_prompt_logprobs_sent - start, 0) :]",
            "logprobs",
        ),
    ],
    "a prompt to be scored takes hits": [
        ("block_manager:BlockManager.may_hit", "and sequence.sampling.prompt_logprobs < 0", "")
    ],
    "salts are ignored": [
        ("block_manager:BlockManager._find_prefix", "sequence.request.prefix_root", '"0:"'),
        ("block_manager:BlockManager.allocate", "sequence.request.prefix_root", '"0:"'),
    ],
    "blocks are published without their salt": [
        ("block_manager:BlockManager.allocate", "sequence.request.prefix_root", '"0:"'),
    ],
    "blocks are found without their salt": [
        ("block_manager:BlockManager._find_prefix", "sequence.request.prefix_root", '"0:"'),
    ],
    "a swapped sequence finds blocks without their salt": [
        ("block_manager:BlockManager.match_prefix", "sequence.request.prefix_root", '"0:"'),
    ],
    "blocks are swapped without their salt": [
        ("block_manager:BlockManager._published_contents", "sequence.request.prefix_root", '"0:"'),
    ],
    "a reset leaves the index": [("block_manager:BlockManager.reset_prefix_cache", "self.index.clear()", "pass")],
    "a reset forgets only what is free": [
        (
            "block_manager:BlockManager.reset_prefix_cache",
            "self.index.clear()",
            "[self.index.forget(block) for block in self.pool._free]",
        ),
    ],
    "what was computed before a reset is published after it": [
        ("block_manager:BlockManager.reset_prefix_cache", "sequence.table.publish_at = NEVER", "pass"),
    ],
    "host blocks are reused while a plan names them": [
        (
            "scheduler:Scheduler.plan",
            "return plan",
            "self._block_manager.host_tier.unpin(self._in_flight[-1].host_blocks)\n    return plan",
        ),
        ("block_manager:BlockManager.unpin", "self.host_tier.unpin(host_blocks)", "pass"),
    ],
    "a copy is read before it has arrived": [
        ("host_tier:HostTier.can_read", " and host_block not in self._written", ""),
    ],
    "a copy is read before it is made": [
        ("host_tier:HostTier.can_read", "host_block not in self._outgoing and ", ""),
    ],
    "a swapped sequence does not wait for its copies": [
        ("block_manager:BlockManager.is_leaving", "any(", "False and any("),
    ],
    "the tail is lost": [
        ("block_manager:BlockManager.swap_out", "-(-num_tokens // self.block_size)", "num_tokens // self.block_size"),
    ],
    "the tail is not brought back": [
        (
            "block_manager:BlockManager.match_prefix",
            "sequence.table.host_blocks[len(hits) :]",
            "sequence.table.host_blocks[len(hits) : num_cached // size]",
        ),
    ],
    "a reused host block stays in the index": [
        ("host_tier:HostTier._take", "self.index.forget(host_block)", "pass"),
    ],
    "what is published again has another node than its copy": [
        ("prefix:PrefixIndex.publish", "if self._below is not None else None", "if False else None"),
    ],
    "hits in host memory are reused to make room for them": [
        ("block_manager:BlockManager.allocate", "self.host_tier.pin(host_block)", "pass"),
        ("block_manager:BlockManager._copy_in", "index += 1", "self.host_tier.pin(host_block); index += 1"),
    ],
    "room for a victim is counted without what it shares": [("host_tier:HostTier.hold", " + num_taken", "")],
    "a plan copies a block that it brings back": [
        (
            "block_manager:BlockManager.match_prefix",
            "if copied is not None and (host_block",
            "if False and (host_block",
        ),
    ],
    "a block that will be written is published": [
        ("block_manager:BlockManager._copy_in", "index * self.block_size <= allocation.num_cached", "True"),
    ],
    "blocks that come back are published under the wrong content": [
        (
            "block_manager:BlockManager._copy_in",
            "self.index.add(published[0], block",
            "self.index.add(published[0], table.blocks[index - 2]",
        ),
    ],
    "what follows a copy is published behind the wrong node": [
        ("block_manager:BlockManager._copy_in", "table.last_node = published[1]", "pass"),
    ],
    "a reused block is saved under another content": [
        ("block_manager:BlockManager._take", "*published, block", "*published, max(block - 1, 0)"),
    ],
    "blocks are saved a plan too late": [
        (
            "scheduler:Scheduler.plan",
            "builder.swap(*self._block_manager.host_tier.take_moves())",
            "moves, late = self._block_manager.host_tier.take_moves(), vars(self).setdefault('late', []);"
            " builder.swap(list(late), moves[1]); late[:] = moves[0]",
        ),
    ],
    "a worker's death leaves host memory": [
        (
            "block_manager:BlockManager.reset",
            "self.host_tier = HostTier(num_host_blocks, self.block_size)",
            "former = vars(self).get('host_tier'); same = former and former.pool.num_blocks == num_host_blocks;"
            " self.host_tier = former if same else HostTier(num_host_blocks, self.block_size)",
        ),
    ],
    "blocks are swapped to a dead worker's memory": [
        ("queues:Queues.reset", "self._release(sequence, may_swap=False)", "self._release(sequence)"),
    ],
    "a worker's death leaves sequences swapped": [
        ("queues:Queues.reset", "self._block_manager.drop_host_blocks(sequence)", "pass"),
    ],
    "an abort leaves its host blocks": [
        ("queues:Queues.finish", "self._block_manager.drop_host_blocks(sequence)", "pass"),
    ],
    "a finished sequence is swapped": [
        ("queues:Queues._release", "may_swap and sequence.finish_reason is None", "may_swap"),
    ],
    "a resumed sequence keeps its host blocks": [
        ("block_manager:BlockManager.allocate", "self.drop_host_blocks(sequence)", "pass"),
    ],
    "a reset leaves the index of host memory": [
        ("block_manager:BlockManager.reset_prefix_cache", "self.host_tier.index.clear()", "pass"),
    ],
    "what was swapped before a reset is published after it": [
        ("scheduler:Scheduler.reset_prefix_cache", ", *queues.waiting.items", ""),
    ],
    "later requests pass the first": [("queues:Queues.first_waiting", "users.items[0]", "users.items[-1]")],
    "requests of another adapter pass the first": [("queues:Queues.first_waiting", "min(firsts", "max(firsts")],
    "streams wait for prompts of any length": [
        ("planner:Planner._budget", "if streaming and", "if False and"),
    ],
    "prompts without streams are bounded": [
        ("planner:Planner._budget", "if streaming and", "if"),
    ],
    "prompts wait until the streams leave them time": [
        ("planner:Budget.for_line", "budget_beside_streams(self.fitting, num_sequences)", "self.fitting"),
    ],
    "a preempted sequence that is back gets two rows": [
        ("planner:Planner._share_budget", "sorted(running, key", "sorted(chunked, key"),
    ],
    "admission takes blocks that are not there": [
        (
            "planner:Planner._find_blocks",
            "allocation.num_free_needed + spare <= block_manager.num_free",
            "allocation.num_new <= block_manager.num_free",
        ),
    ],
    "all grammars come at once": [
        ("new_grammars:NewGrammars.add", "self._length and self._length + length > MAX_LENGTH", "False"),
    ],
    "a long grammar never comes": [
        ("new_grammars:NewGrammars.add", "self._length and self._length", "self._length"),
    ],
    "short grammars cost nothing": [
        ("new_grammars:NewGrammars.add", "max(len(grammar), LEAST_LENGTH)", "len(grammar)"),
    ],
    "a worker's death leaves plans in flight": [
        ("scheduler:Scheduler._forget_worker", "self._in_flight.clear()", "pass")
    ],
    "a worker's death leaves the index": [
        ("block_manager:BlockManager.reset", "self.index = ", "self.index = vars(self).get('index') or "),
    ],
    "an orderly end makes suspects": [
        (
            "scheduler:Scheduler.end_epoch",
            "self._forget_worker(",
            "self._quarantine.lose_worker(list(self._queues.running.items)); self._forget_worker(",
        ),
    ],
    "an orderly end is a loss": [
        (
            "scheduler:Scheduler.end_epoch",
            "self._forget_worker(",
            "self._counters.count_worker_loss(); self._forget_worker(",
        ),
    ],
    "an orderly end keeps the slots": [
        (
            "scheduler:Scheduler.end_epoch",
            "self._forget_worker(*self._block_manager.sizes)",
            "self._epoch = None",
        ),
    ],
    "an orderly end ends the quarantine": [
        (
            "scheduler:Scheduler.end_epoch",
            "self._forget_worker(",
            "self._quarantine._uncleared.clear(); self._quarantine._groups.clear(); self._forget_worker(",
        ),
    ],
    "one death makes a culprit": [("quarantine:_is_proven", ">= MAX_DEATHS_ALONE", ">= 1")],
    "two deaths anywhere make a culprit": [("quarantine:_is_proven", ">= MAX_DEATHS_ALONE", ">= 2")],
    "two deaths at one place make no culprit": [("quarantine:_is_proven", "same_place or ", "")],
    "a death in company is evidence": [
        ("quarantine:Quarantine.lose_worker", "is_evidence and len(in_flight) == 1", "is_evidence"),
    ],
    "deaths are counted twice": [
        ("quarantine:_with_another_death", "before.deaths_alone + 1", "before.deaths_alone + 2")
    ],
    "a cleared suspect keeps its deaths": [
        (
            "quarantine:Quarantine.note_computed",
            "sequence.suspect(Suspicion())",
            "sequence.suspect(replace(sequence.suspicion, cleared_at=0))",
        ),
    ],
    "suspects are cleared too early": [
        ("quarantine:Quarantine.note_computed", "row.start + row.count >=", "row.start + row.count + 1 >="),
    ],
    "a suspect that is preempted in time is not cleared": [
        ("quarantine:Quarantine.note_computed", "if row.start", "if sequence.slot < 0 and row.start"),
    ],
    "nobody hears of a suspicion": [
        ("scheduler:Scheduler.lose_worker", "[_row_without_tokens(suspect) for suspect in suspects]", "[]"),
    ],
    "suspects have company": [("planner:Planner._next_waiting", "if self._quarantine.active:", "if False:")],
    "suspects start in company": [("scheduler:Scheduler._start_group", "self._queues.preempt(sequence)", "pass")],
    "suspects are never separated": [
        ("quarantine:Quarantine.lose_worker", "(len(suspects) + 1) // 2", "len(suspects)"),
    ],
    "blocks of an adapter are found by others": [
        ("sequence:Request.__init__", "adapter.number if adapter else 0", "0"),
    ],
    "blocks of an adapter are found by what replaces it": [
        ("sequence:Request.__init__", "adapter.number if adapter else 0", "adapter.name if adapter else 0"),
    ],
    "an adapter is let go with plans in flight": [
        (
            "queues:Queues._stop",
            "self.running.remove(sequence)",
            "self.running.remove(sequence); self._adapters.release(sequence.request.adapter)",
        ),
        ("queues:Queues._release", "self._adapters.release(sequence.request.adapter)", "pass"),
    ],
    "a slot is taken from those that use it": [
        ("adapters:Adapters.assign_slot", "and not other.num_holders", ""),
        ("adapters:Adapters.is_available", "and self._num_idle > claimed", ""),
    ],
    "the worker does not hear of a slot": [
        ("plan_builder:PlanBuilder.put_adapter", "self.adapter_slots.append", "str")
    ],
    "a worker's death leaves adapters in slots": [
        ("adapters:Adapters.reset", "adapter.host, adapter.slot = Host.ABSENT, -1", "adapter.host = Host.ABSENT"),
    ],
    "a worker's death leaves adapters loaded": [
        ("adapters:Adapters.reset", "adapter.host, adapter.slot = Host.ABSENT, -1", "adapter.slot = -1"),
    ],
    "an adapter that is used is unloaded": [
        ("adapters:Adapters._make_room", "and not adapter.num_holders", ""),
    ],
    "what is unloaded stays in its slot": [
        ("adapters:Adapters._unload", "adapter.host, adapter.slot = Host.ABSENT, -1", "adapter.host = Host.ABSENT"),
    ],
    "an adapter that nobody can name stays loaded": [
        ("adapters:Adapters._drop_if_unused", "if adapter.host is Host.LOADED:", "if False:"),
    ],
    "an adapter that is replaced is dropped with requests left": [
        ("adapters:Adapters._drop_if_unused", "or adapter.num_requests or", "or"),
    ],
    "a drained slot takes more": [
        ("adapters:Adapters.is_available", "adapter is not self._draining or not (claimed or self._added)", "True"),
    ],
    "an idle slot is not kept for the claim": [("adapters:Adapters.is_available", "> claimed", "> 0")],
    "a claim unloads nothing": [
        ("adapters:Adapters.claim", "self._make_room(may_be_in_use=True)", "self._make_room(may_be_in_use=False)"),
    ],
    "files that have changed are not noticed": [
        ("adapters:Adapters.note_loaded", "adapter.digest != digest", "False"),
    ],
    "requests of an adapter that is gone wait": [
        ("scheduler:Scheduler.adapter_refused", "if refused is not None", "if False"),
    ],
    "those that have their adapter are passed": [
        ("planner:Planner._admit", "if not self._adapters", "if sequence.sample == 1 or not self._adapters"),
        ("planner:Planner._admit", "if not passed:", "if not passed and adapter:"),
    ],
    "aborting the parent forgets its other samples": [
        ("queues:Queues._remove_from_request", "self.enqueue(successor)", "pass"),
    ],
    "an abort is sent twice": [
        ("queues:Queues._remove_from_request", "del request.unfinished[sequence.sample]", "pass")
    ],
}


@pytest.mark.parametrize("name", MUTANTS)
def test_simulation_finds_the_mutant(name: str) -> None:
    with mutated(CORE, MUTANTS[name]):
        assert any(_fails(seed) for seed in range(ENOUGH)), f"not found: {name}"


WRONG_ORDERS = {
    "blocks are copied before others are saved": ["_copy", "_swap_out", "_swap_in", "_compute_rows"],
    "blocks come back before others are saved": ["_swap_in", "_swap_out", "_copy", "_compute_rows"],
    "rows are computed before blocks come back": ["_swap_out", "_copy", "_compute_rows", "_swap_in"],
    "rows are computed before blocks are saved": ["_copy", "_swap_in", "_compute_rows", "_swap_out"],
}


@pytest.mark.parametrize("name", WRONG_ORDERS)
def test_simulation_finds_a_worker_with_another_order(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(SimulatedWorker, "ORDER", WRONG_ORDERS[name])
    assert any(_fails(seed) for seed in range(ENOUGH)), f"not found: {name}"


def _fails(seed: int) -> bool:
    try:
        workloads.run(seed)
    except Exception:
        return True
    return False
