"""What must hold of a scheduler core between any two of its verbs. Looks inside on purpose."""

from collections import Counter

from simulated_worker import EMPTY, SimulatedWorker, cell

from services.scheduler.core import Scheduler
from services.scheduler.core.prefix import ROOT
from services.scheduler.core.sequence import Sequence, State


def check(core: Scheduler, worker: SimulatedWorker | None) -> None:
    """AssertionError if the state is not sound; `worker` is the one that the core's epoch configured."""
    roster = core._roster
    holders = [*roster.running.items, *roster.draining]
    _check_places(core, holders)
    _check_numbers(core, holders)
    _check_blocks(core, holders)
    if worker is not None:
        _check_index(core, worker)


def check_writes(core: Scheduler) -> None:
    """The plan just made writes only blocks that one table has; a fork's parent shares its own from now on."""
    pool, size = core._memory.pool, core._memory.block_size
    flight = core._flights[-1]
    parents = {
        id(sequence.request) for row, sequence in zip(flight.rows, flight.sequences, strict=True) if not row.count
    }
    for row, sequence in zip(flight.rows, flight.sequences, strict=True):
        if id(sequence.request) in parents and row.start < sequence.prompt_len:
            continue
        for position in range(row.start, row.start + row.count):
            assert pool.refs[sequence.blocks[position // size]] == 1, f"a shared block is written: {sequence!r}"


def _check_places(core: Scheduler, holders: list[Sequence]) -> None:
    roster = core._roster
    slots = [sequence.slot for sequence in holders]
    assert sorted(slots + roster.slots) == list(range(core.limits.max_num_seqs)), "each slot is free or used once"
    assert set(roster.released) <= set(range(core.limits.max_num_seqs))
    for place, state in ((roster.running, State.RUNNING), (roster.waiting, State.WAITING)):
        assert all(sequence.state is state and sequence.finish_reason is None for sequence in place.items)
        assert [sequence.key for sequence in place.items] == sorted(sequence.key for sequence in place.items)
    assert all(sequence.state is State.DRAINING and sequence.in_flight for sequence in roster.draining)
    live = [sequence for request in roster.requests.values() for sequence in request.live.values()]
    placed = [sequence for sequence in [*holders, *roster.waiting.items] if sequence.finish_reason is None]
    assert Counter(map(id, live)) == Counter(map(id, placed)), "every unfinished sequence is in one place"
    assert roster.unborn == sum(len(request.unborn) for request in roster.requests.values())
    assert all(request.live for request in roster.requests.values()), "somebody computes the prompt"
    assert roster.waiting_tokens == sum(len(sequence.tokens) for sequence in roster.waiting.items)
    for sequence in roster.waiting.items:
        assert (sequence.blocks, sequence.slot, sequence.in_flight) == ([], -1, 0), "who waits holds nothing"


def _check_numbers(core: Scheduler, holders: list[Sequence]) -> None:
    named: Counter[int] = Counter()
    sampling: Counter[int] = Counter()
    for flight in core._flights:
        for row, sequence in zip(flight.rows, flight.sequences, strict=True):
            named[id(sequence)] += 1
            sampling[id(sequence)] += row.samples
    for sequence in holders:
        assert sequence.in_flight == named.pop(id(sequence), 0), "plans in flight are counted"
        assert 0 <= sequence.computed <= sequence.planned <= sequence.end <= core.limits.max_model_len
        if sequence.finish_reason is None:
            assert sequence.known == len(sequence.tokens) + sampling[id(sequence)] <= sequence.limit
    assert not named, "who is named by a plan in flight holds a slot"


def _check_blocks(core: Scheduler, holders: list[Sequence]) -> None:
    memory, pool, size = core._memory, core._memory.pool, core._memory.block_size
    refs = Counter(block for sequence in holders for block in sequence.blocks)
    pins = Counter(block for flight in core._flights for block in flight.pins)
    assert pool.refs == [refs[block] for block in range(pool.num_blocks)], "references are counted"
    assert pool._pins == dict(pins), "pins are counted"
    assert set(pool._free) == set(range(pool.num_blocks)) - set(refs) - set(pins), "free + held = all"
    stored: dict[int, int] = {}
    proven: set[int] = set()
    for sequence in holders:
        assert len(set(sequence.blocks)) == len(sequence.blocks)
        assert sequence.planned <= len(sequence.blocks) * size
        for index, block in enumerate(sequence.blocks):
            filled = min(max(sequence.planned - index * size, 0), size)
            stored[block] = max(stored.get(block, 0), filled)
        committed = [block for index, block in enumerate(sequence.blocks) if (index + 1) * size <= sequence.computed]
        proven.update(committed)
    assert all(block in proven for block in refs if block in memory.index), "only committed blocks are published"
    assert memory.stored == sum(stored.values()), "tokens held are counted, shared ones once"
    wanted = sum(sequence.coming for sequence in holders)
    assert core._roster.coming == wanted


def _check_index(core: Scheduler, worker: SimulatedWorker) -> None:
    """Each published block holds the cells of exactly the tokens that it is found by."""
    index, size = core._memory.index, core._memory.block_size
    ends = {ROOT: EMPTY}
    for (parent, content), entry in sorted(index._entries.items(), key=lambda item: item[1].serial):
        if parent not in ends:
            continue  # what stood before it is forgotten, so nobody can find it
        value, cells = ends[parent], []
        for token in memoryview(content).cast("i"):
            value = cell(value, token)
            cells.append(value)
        assert worker.pages[entry.block] == cells, "the index points to blocks with that content"
        ends[entry.serial] = value
    assert len(index._keys) == len(index._entries)
    assert all(index._entries[key].block == block for block, key in index._keys.items())
    assert size == worker.configure.block_size
