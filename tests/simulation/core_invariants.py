"""The invariants of a scheduler core between any two calls. The checks read private state on purpose."""

from collections import Counter

from simulated_worker import SimulatedWorker, before_first, cell

from services.scheduler.core import Scheduler
from services.scheduler.core.adapters import Host
from services.scheduler.core.sequence import Sequence, State


def check(core: Scheduler, worker: SimulatedWorker | None) -> None:
    """Raise AssertionError if the state is not sound. `worker` is the one that the core's epoch configured."""
    queues = core._queues
    holders = [*queues.running.items, *queues.stopping]
    _check_places(core, holders)
    _check_numbers(core, holders)
    _check_blocks(core, holders)
    _check_host_tier(core)
    if worker is not None:
        _check_index(core, worker)
        _check_host_blocks(core, worker)
    _check_adapters(core, holders, worker)


def check_writes(core: Scheduler) -> None:
    """Raise AssertionError if the plan just made writes a block that several tables have.

    The parent of a fork in this plan is exempt: it shares its blocks from now on.
    """
    pool, size = core._block_manager.pool, core._block_manager.block_size
    plan = core._in_flight[-1]
    parents = {id(sequence.request) for row, sequence in zip(plan.rows, plan.sequences, strict=True) if not row.count}
    for row, sequence in zip(plan.rows, plan.sequences, strict=True):
        if id(sequence.request) in parents and row.start < sequence.prompt_len:
            continue
        for position in range(row.start, row.start + row.count):
            assert pool.refs[sequence.table.blocks[position // size]] == 1, f"a shared block is written: {sequence!r}"


def _check_places(core: Scheduler, holders: list[Sequence]) -> None:
    queues = core._queues
    slots = [sequence.slot for sequence in holders]
    assert sorted(slots + queues.free_slots) == list(range(core.limits.max_num_seqs)), "each slot is free or used once"
    assert set(queues.released_slots) <= set(range(core.limits.max_num_seqs))
    for place, state in ((queues.running, State.RUNNING), (queues.waiting, State.WAITING)):
        assert all(sequence.state is state and sequence.finish_reason is None for sequence in place.items)
        assert [sequence.key for sequence in place.items] == sorted(sequence.key for sequence in place.items)
    assert all(sequence.state is State.STOPPING and sequence.progress.in_flight for sequence in queues.stopping)
    unfinished = [sequence for request in queues.requests.values() for sequence in request.unfinished.values()]
    placed = [sequence for sequence in [*holders, *queues.waiting.items] if sequence.finish_reason is None]
    assert Counter(map(id, unfinished)) == Counter(map(id, placed)), "every unfinished sequence is in one place"
    assert queues.num_unstarted == sum(len(request.unstarted_samples) for request in queues.requests.values())
    assert all(request.unfinished for request in queues.requests.values()), "somebody computes the prompt"
    assert queues.waiting_tokens == sum(len(sequence.tokens) for sequence in queues.waiting.items)
    for adapter, place in queues.waiting_by_adapter.items():
        users = [sequence for sequence in queues.waiting.items if sequence.request.adapter is adapter]
        assert place.items == users != [], "each waiting sequence is found by its adapter, in order"
    assert len(queues.waiting) == sum(map(len, queues.waiting_by_adapter.values()))
    for sequence in queues.waiting.items:
        holds = (sequence.table.blocks, sequence.slot, sequence.progress.in_flight)
        assert holds == ([], -1, 0), "a waiting sequence holds nothing"


def _check_numbers(core: Scheduler, holders: list[Sequence]) -> None:
    rows: Counter[int] = Counter()
    samples: Counter[int] = Counter()
    for plan in core._in_flight:
        for row, sequence in zip(plan.rows, plan.sequences, strict=True):
            rows[id(sequence)] += 1
            samples[id(sequence)] += row.samples
    for sequence in holders:
        progress = sequence.progress
        assert progress.in_flight == rows.pop(id(sequence), 0), "plans in flight are counted"
        assert core.limits.num_stages == 1 or samples[id(sequence)] <= 1, "stages wait for a sequence's last token"
        assert 0 <= progress.num_computed <= progress.num_scheduled <= progress.max_num_computed
        assert progress.max_num_computed <= core.limits.max_model_len
        if sequence.finish_reason is None:
            expected = len(sequence.tokens) + samples[id(sequence)]
            assert progress.num_tokens == expected <= progress.max_num_tokens
    assert not rows, "a sequence that a plan in flight names holds a slot"


def _check_blocks(core: Scheduler, holders: list[Sequence]) -> None:
    block_manager, pool, size = core._block_manager, core._block_manager.pool, core._block_manager.block_size
    refs = Counter(block for sequence in holders for block in sequence.table.blocks)
    pins = Counter(block for plan in core._in_flight for block in plan.pinned_blocks)
    assert pool.refs == [refs[block] for block in range(pool.num_blocks)], "references are counted"
    assert pool._pins == dict(pins), "pins are counted"
    assert set(pool._free) == set(range(pool.num_blocks)) - set(refs) - set(pins), "free + held = all"
    held: dict[int, int] = {}  # scheduled positions, by block
    committed: set[int] = set()
    for sequence in holders:
        blocks, progress = sequence.table.blocks, sequence.progress
        assert len(set(blocks)) == len(blocks)
        assert progress.num_scheduled <= len(blocks) * size
        for index, block in enumerate(blocks):
            filled = min(max(progress.num_scheduled - index * size, 0), size)
            held[block] = max(held.get(block, 0), filled)
        committed.update(block for index, block in enumerate(blocks) if (index + 1) * size <= progress.num_computed)
    assert all(block in committed for block in refs if block in block_manager.index), (
        "only committed blocks are published"
    )
    assert block_manager.tokens_held == sum(held.values()), "tokens held are counted, shared ones once"
    assert block_manager.blocks_pending_free == sum(sequence.table.num_pending_free for sequence in holders)


def _check_adapters(core: Scheduler, holders: list[Sequence], worker: SimulatedWorker | None) -> None:
    adapters, queues = core._adapters, core._queues
    held = Counter(one.request.adapter for one in holders if one.request.adapter is not None)
    used = Counter(one.adapter for one in queues.requests.values() if one.adapter is not None)
    everyone = adapters._all.values()
    assert set(held) | set(used) | set(adapters._named.values()) | set(adapters._added) <= set(everyone)
    for adapter in everyone:
        assert (adapter.num_holders, adapter.num_requests) == (held[adapter], used[adapter]), "users are counted"
        assert adapter.slot < 0 or adapters._slots[adapter.slot] is adapter
        assert adapter.slot >= 0 or not held[adapter], "what is held is in a slot"
        assert adapter.host is Host.LOADED or adapter.slot < 0, "what is in a slot is loaded"
        assert not adapter.is_retired or held[adapter] or used[adapter] or adapter.host is Host.LOADING
    assert adapters._num_held == len(held) <= adapters.max_loras
    assert adapters._draining is None or held[adapters._draining]
    assert all(adapter is None or adapter in everyone for adapter in adapters._slots)
    in_host = [adapter.number for adapter in everyone if adapter.host is not Host.ABSENT]
    assert len(in_host) <= adapters._max_cpu_loras
    if worker is None:
        assert not in_host
        return
    assert set(worker.loaded) <= set(in_host), "what the core has forgotten is unloaded"
    for adapter in everyone:
        assert adapter.host is not Host.LOADED or adapter.number in worker.loaded


def _check_host_tier(core: Scheduler) -> None:
    """Check the counts of the host blocks."""
    block_manager, tier = core._block_manager, core._block_manager.host_tier
    swapped = [sequence for sequence in core._queues.waiting.items if sequence.table.host_blocks]
    refs = Counter(block for sequence in swapped for block in sequence.table.host_blocks)
    pins = Counter(block for plan in core._in_flight for block in plan.host_blocks)
    pins.update(list(tier._outgoing))  # for the next plan
    assert block_manager.num_swapped == len(swapped)
    assert tier.num_held == len(refs)
    assert tier.pool.refs == [refs[block] for block in range(tier.pool.num_blocks)], "holds are counted"
    assert tier.pool._pins == dict(pins), "pins of host blocks are counted"
    assert not tier._incoming, "what a plan brings back is named by that plan"
    unused = set(range(tier.pool.num_blocks)) - set(refs) - set(pins)
    assert set(tier.pool._free) == unused, "free + held = all, of host blocks too"
    for sequence in swapped:
        table = sequence.table
        assert len(table.host_blocks) == -(-table.num_in_host // block_manager.block_size)
        assert 0 < table.num_in_host < len(sequence.tokens), "a token is left to compute"
        assert len(set(table.host_blocks)) == len(table.host_blocks)
    named = {block for plan in core._in_flight for block in plan.host_blocks}
    assert set(tier._written) <= named, "only plans in flight write"


def _check_index(core: Scheduler, worker: SimulatedWorker) -> None:
    """Check that each published block holds the cells of exactly the tokens that its key names, on both levels."""
    index, tier, size = core._block_manager.index, core._block_manager.host_tier, core._block_manager.block_size
    published = sorted([*index._entries.items(), *tier.index._entries.items()], key=lambda item: item[1].node)
    contents = worker.contents
    ends: dict[int, tuple[int, int]] = {}  # the last cell, and the content of the adapter
    for (parent, content), entry in published:
        if isinstance(parent, int) and parent not in ends:
            continue  # the block before it is forgotten, so nobody can find it
        if isinstance(parent, str):
            number, _, salt = parent.partition(":")
            value, adapter = before_first(salt), contents[int(number)]
        else:
            value, adapter = ends[parent]
        cells = []
        for token in memoryview(content).cast("i"):
            value = cell(value, token, adapter)
            cells.append(value)
        if index.find((parent, content)) == entry:
            assert worker.pages[entry.block] == cells, "the index points to blocks with that content"
        if tier.index.find((parent, content)) == entry and tier.can_read(entry.block):
            assert worker.host_pages[entry.block] == cells, "so does the index of host memory"
        ends[entry.node] = value, adapter
    nodes = [entry.node for entry in dict(published).values()]
    assert len(set(nodes)) == len(nodes), "contents have different nodes"
    for one in (index, tier.index):
        assert len(one._keys) == len(one._entries)
        assert all(one._entries[key].block == block for block, key in one._keys.items())
    common = index._entries.keys() & tier.index._entries.keys()
    assert all(index._entries[key].node == tier.index._entries[key].node for key in common), "a content has one node"
    assert size == worker.configure.block_size


def _check_host_blocks(core: Scheduler, worker: SimulatedWorker) -> None:
    """Check that the host blocks of swapped sequences hold the cells of their tokens."""
    tier, size = core._block_manager.host_tier, core._block_manager.block_size
    for sequence in core._queues.waiting.items:
        if not sequence.table.host_blocks:
            continue
        number, _, salt = sequence.request.prefix_root.partition(":")
        table, value, adapter = sequence.table, before_first(salt), worker.contents[int(number)]
        for index, host_block in enumerate(table.host_blocks):
            cells = []
            for token in sequence.tokens[index * size : min(index * size + size, table.num_in_host)]:
                value = cell(value, token, adapter)
                cells.append(value)
            if tier.can_read(host_block):
                assert worker.host_pages[host_block][: len(cells)] == cells, "a swapped sequence keeps its content"
