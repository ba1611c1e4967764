"""A worker whose KV memory shows every paging error: the page-memory oracle of the simulation.

A cell of memory is a digest of all tokens up to its position, made from the previous cell, read through the block
table, and the token. The next token is a digest of all cells read back, the output so far, and the noise of its seed,
sample and output position. So a wrong table, a block reused too early, a bad share or a lost token changes what is
sampled. What stands before the first cell is a digest of the request's `cache_salt`, so a block of another salt changes
it as well. Each cell and each token depends on the content of the adapter that is in the sequence's adapter slot in
that step, so a block of another adapter or a wrong slot changes it too. `expected_output` computes the output of one
sequence without blocks and without a scheduler.

Host memory has cells too. A copy to it lands when the plan's result is back, as on a device that copies on a stream of
its own, and a host block that is copied from must not change until then.

The worker applies plans in the order that the protocol documents and refuses those that break its rules. With pipeline
stages it is the first of them, and knows of the tokens that it samples only what plans tell it.
"""

from collections import deque
from collections.abc import Iterable, Mapping
from typing import NamedTuple

from shared.protocol import (
    Configure,
    FinishReason,
    Fork,
    NewSequence,
    Row,
    SampledRow,
    Sampling,
    StepPlan,
    StepResult,
    TokenLogprobs,
    unpack_tokens,
)

VOCABULARY = 7  # small, so that different sequences have equal blocks
EMPTY = 1
UNWRITTEN = -1
NO_ADAPTER = 0


def before_first(salt: str) -> int:
    """Return what stands before the first cell of a sequence."""
    return hash((EMPTY, *salt.encode())) if salt else EMPTY


def cell(previous: int, token: int, adapter: int = NO_ADAPTER) -> int:
    """Return the digest of all tokens up to here. Hashes of integers are the same in every process."""
    return hash((previous, token, adapter)) if adapter else hash((previous, token))


def sample_token(
    cells: Iterable[int], output: list[int], sampling: Sampling, sample: int, adapter: int = NO_ADAPTER
) -> int:
    """Return the next token behind the cells of the context."""
    key = hash((tuple(cells), tuple(output), sampling.seed, sample))
    if adapter:
        key = hash((key, adapter))
    attempt = 0
    while True:
        token = hash((key, attempt)) % VOCABULARY
        if len(output) >= sampling.min_tokens or token not in sampling.stop_token_ids:
            return token
        attempt += 1


def score(previous: int, token: int) -> TokenLogprobs:
    """Return the log-probability of a token after the context whose last cell is `previous`."""
    return TokenLogprobs(-float(hash((previous, token, 1)) % 1000), token, [], [])


class StepCosts(NamedTuple):
    """What a worker's steps take, in seconds."""

    step: float = 0.0  # any step
    row: float = 0.0  # a row of one position
    token: float = 0.0  # a position of a longer row
    context: float = 0.0  # a pair of such a position and one before its row

    def seconds(self, rows: list[Row]) -> float:
        """Return what a step of these rows takes."""
        single = sum(row.count == 1 for row in rows)
        chunked = [row for row in rows if row.count > 1]
        seconds = self.step + single * self.row + sum(row.count for row in chunked) * self.token
        return seconds + sum(row.count * row.start for row in chunked) * self.context


AT_ONCE = StepCosts()
"""Steps that take no time."""


class ExpectedOutput(NamedTuple):
    """The output of a sequence that runs alone."""

    tokens: list[int]
    finish_reason: FinishReason
    scores: list[TokenLogprobs]  # of the prompt, from position 1


def expected_output(
    tokens: list[int], prompt_len: int, sampling: Sampling, sample: int, salt: str = "", adapter: int = NO_ADAPTER
) -> ExpectedOutput:
    """Return the output of one sequence that runs alone, computed without blocks or a scheduler."""
    cells: list[int] = []
    for token in tokens:
        cells.append(cell(cells[-1] if cells else before_first(salt), token, adapter))
    scores = [score(cells[i - 1], tokens[i]) for i in range(1, prompt_len)] if sampling.prompt_logprobs >= 0 else []
    output = tokens[prompt_len:]
    while len(output) < sampling.max_tokens:
        output.append(sample_token(cells, output, sampling, sample, adapter))
        if output[-1] in sampling.stop_token_ids:
            return ExpectedOutput(output, FinishReason.STOP, scores)
        cells.append(cell(cells[-1], output[-1], adapter))
    return ExpectedOutput(output, FinishReason.LENGTH, scores)


class Slot:
    """A running sequence, as the worker keeps it."""

    def __init__(
        self,
        tokens: list[int],
        prompt_len: int,
        table: list[int],
        sampling: Sampling,
        sample: int,
        adapter_slot: int,
    ) -> None:
        self.tokens = tokens
        self.adapter_slot = adapter_slot
        self.prompt_len = prompt_len
        self.table = table
        self.sampling = sampling
        self.sample = sample
        self.untold: deque[int] = deque()  # sampled tokens of which plans have not told


class HostCopies:
    """The copies of a plan whose result is not back."""

    def __init__(self) -> None:
        self.written: dict[int, tuple[list[int], list[int]]] = {}  # by host block: cells to come, and their steps
        self.read: dict[int, list[int]] = {}  # by host block: the cells that were there


class SimulatedWorker:
    """Executes plans over memory of the configured sizes. Raise AssertionError for one that breaks the rules.

    `salts` are those of requests, by their seeds: plans do not have them. It takes `max_loras` adapters in a step, and
    `max_cpu_loras` in host memory.
    """

    ORDER = ("_swap_out", "_copy", "_swap_in", "_compute_rows")
    """What a plan does with blocks, as the protocol has it."""

    def __init__(
        self,
        configure: Configure,
        salts: Mapping[int, str] = {},
        costs: StepCosts = AT_ONCE,
        max_loras: int = 0,
        max_cpu_loras: int = 0,
        num_stages: int = 1,
    ) -> None:
        self.configure = configure
        self._num_stages = num_stages
        self.costs = costs
        self.pages = [[UNWRITTEN] * configure.block_size for _ in range(configure.num_blocks)]
        self.computed_in = [[0] * configure.block_size for _ in range(configure.num_blocks)]  # steps, from 1
        self.host_pages = [[UNWRITTEN] * configure.block_size for _ in range(configure.num_host_blocks)]
        self._host_computed_in = [[0] * configure.block_size for _ in range(configure.num_host_blocks)]
        self._copies: deque[HostCopies] = deque()  # of the plans whose results are not back
        self.slots: dict[int, Slot] = {}
        self.num_steps = 0
        self._salts = salts
        self.max_loras = max_loras
        self.max_cpu_loras = max_cpu_loras
        self.loaded: dict[int, int] = {}  # contents of the adapters in host memory, by their numbers
        self.contents: dict[int, int] = {NO_ADAPTER: NO_ADAPTER}  # of all that were ever loaded here
        self.adapter_slots: dict[int, int] = {}  # contents of adapters
        self.adapter_in_slot: dict[int, int] = {}  # their numbers

    def load_adapter(self, number: int, content: int) -> None:
        """Load an adapter with this content into host memory."""
        assert number not in self.loaded, "an adapter is loaded once"
        self.loaded[number] = content
        self.contents.setdefault(number, content)  # a load that differs from the first is of no use
        assert len(self.loaded) <= self.max_cpu_loras

    def unload_adapter(self, number: int) -> None:
        """Drop an adapter. The sequences in slots do not use it, nor do those of plans that are executed."""
        del self.loaded[number]

    def execute(self, plan: StepPlan) -> StepResult:
        """Execute one step, in the documented order."""
        assert (plan.epoch, plan.step) == (self.configure.epoch, self.num_steps), "plans come in order"
        self.num_steps += 1
        for slot in plan.released_slots:
            del self.slots[slot]
        for new in plan.new_sequences:
            self._add_sequence(new)
        for fork in plan.forks:
            self._fork(fork)
        for slot, token in plan.sampled:
            assert token == self.slots[slot].untold.popleft(), "what is told is what was sampled"
            self.slots[slot].tokens.append(token)
        for write in plan.table_writes:
            table = self.slots[write.slot].table
            assert write.index <= len(table), "tables have no holes"
            table[write.index : write.index + len(write.blocks)] = write.blocks
        for adapter_slot, number in plan.adapter_slots:
            assert 0 <= adapter_slot < self.max_loras
            self.adapter_slots[adapter_slot], self.adapter_in_slot[adapter_slot] = self.loaded[number], number
        self._check(plan.rows)
        self._copies.append(HostCopies())
        for step in self.ORDER:
            getattr(self, step)(plan)
        children = {fork.parent: [slot for slot, _ in fork.children] for fork in plan.forks}
        answers = [answer for row in plan.rows for answer in self._answer(row, children)]
        return StepResult(plan.epoch, plan.step, answers, self.costs.seconds(plan.rows))

    def _add_sequence(self, new: NewSequence) -> None:
        assert new.slot not in self.slots, "a slot has one sequence"
        assert 0 <= new.slot < self.configure.max_num_seqs
        tokens = unpack_tokens(new.tokens).tolist()
        self.slots[new.slot] = Slot(
            tokens, new.prompt_len, list(new.blocks), new.sampling, new.sample, new.adapter_slot
        )

    def _fork(self, fork: Fork) -> None:
        parent = self.slots[fork.parent]
        for slot, sample in fork.children:
            assert slot not in self.slots, "a slot has one sequence"
            self.slots[slot] = Slot(
                list(parent.tokens),
                parent.prompt_len,
                list(parent.table),
                parent.sampling,
                sample,
                parent.adapter_slot,
            )

    def _adapter(self, slot: Slot) -> int:
        """Return the content of the adapter that a sequence's adapter slot holds now."""
        if slot.adapter_slot < 0:
            return NO_ADAPTER
        assert self.adapter_in_slot[slot.adapter_slot] in self.loaded, "what a row uses is in host memory"
        return self.adapter_slots[slot.adapter_slot]

    def _copy(self, plan: StepPlan) -> None:
        copies = plan.block_copies
        sources, destinations = {source for source, _ in copies}, [destination for _, destination in copies]
        assert not sources & set(destinations), "no block is on both sides"
        assert len(set(destinations)) == len(destinations), "a block is written once"
        for source, destination in copies:
            self.pages[destination] = list(self.pages[source])
            self.computed_in[destination] = list(self.computed_in[source])

    def _swap_out(self, plan: StepPlan) -> None:
        """Read the blocks that go to host memory, where they are not yet."""
        *others, copies = self._copies
        named = {host_block for other in others for host_block in [*other.written, *other.read]}
        destinations = [host_block for _, host_block in plan.swap_out]
        assert len(set(destinations)) == len(destinations), "a host block is written once"
        assert not named & set(destinations), "no plan in flight names a host block that is written"
        for block, host_block in plan.swap_out:
            copies.written[host_block] = (list(self.pages[block]), list(self.computed_in[block]))
            self.host_pages[host_block] = [UNWRITTEN] * self.configure.block_size

    def _swap_in(self, plan: StepPlan) -> None:
        destinations = [block for _, block in plan.swap_in]
        assert len(set(destinations)) == len(destinations), "a block is written once"
        for host_block, block in plan.swap_in:
            assert UNWRITTEN not in self.host_pages[host_block][:1], "what is copied back has landed"
            self.pages[block] = list(self.host_pages[host_block])
            self.computed_in[block] = list(self._host_computed_in[host_block])
            self._copies[-1].read[host_block] = list(self.pages[block])

    def land(self) -> None:
        """Let the copies of the oldest plan whose result is not back reach host memory, just before it is."""
        copies = self._copies.popleft()
        for host_block, cells in copies.read.items():
            assert self.host_pages[host_block] == cells, "a host block stays until it is copied"
        for host_block, (cells, computed_in) in copies.written.items():
            self.host_pages[host_block], self._host_computed_in[host_block] = cells, computed_in

    def _check(self, rows: list[Row]) -> None:
        assert rows, "a step has rows"
        assert len({row.slot for row in rows}) == len(rows), "one row a slot"
        assert sum(row.count for row in rows) <= self.configure.max_num_batched_tokens
        for row in rows:
            slot = self.slots[row.slot]
            end = row.start + row.count
            assert row.count > 0
            assert 0 <= row.start < end <= len(slot.tokens), "a row's tokens are in its slot"
            assert end <= len(slot.table) * self.configure.block_size, "a row's positions have blocks"
            assert end <= self.configure.max_model_len
            assert row.samples in (0, 1)
            assert not row.samples or end == len(slot.tokens), "only a row that ends at the last token samples"

    def _compute_rows(self, plan: StepPlan) -> None:
        for row in plan.rows:  # all of them write before any of them samples
            self._compute(row)

    def _compute(self, row: Row) -> None:
        slot, size = self.slots[row.slot], self.configure.block_size
        first, adapter = before_first(self._salts.get(slot.sampling.seed, "")), self._adapter(slot)
        for position in range(row.start, row.start + row.count):
            last = position - 1
            before = self.pages[slot.table[last // size]][last % size] if position else first
            self.pages[slot.table[position // size]][position % size] = cell(before, slot.tokens[position], adapter)
            self.computed_in[slot.table[position // size]][position % size] = self.num_steps

    def _answer(self, row: Row, children: dict[int, list[int]]) -> list[SampledRow]:
        slot, end = self.slots[row.slot], row.start + row.count
        scores = self._scores(slot, row) if slot.sampling.prompt_logprobs >= 0 else None
        if not row.samples:
            assert row.slot not in children, "a fork's parent samples"
            return [SampledRow(row.slot, [], None, scores)] if scores else []
        cells = self._read(slot, end)
        answers = []
        for index in [row.slot, *children.get(row.slot, [])]:
            one = self.slots[index]
            output = one.tokens[one.prompt_len :]
            token = sample_token(cells, output, one.sampling, one.sample, self._adapter(one))
            answers.append(SampledRow(index, [token], None, scores if one is slot else None))
            (one.untold if self._num_stages > 1 else one.tokens).append(token)
        return answers

    def oldest_step(self, row: Row) -> int:
        """Return the step that has computed the oldest cell before a row; a very late one if the row is the first."""
        slot, size = self.slots[row.slot], self.configure.block_size
        return min((self.computed_in[slot.table[at // size]][at % size] for at in range(row.start)), default=1 << 60)

    def _read(self, slot: Slot, end: int) -> list[int]:
        size = self.configure.block_size
        cells = [value for block in slot.table[: -(-end // size)] for value in self.pages[block]]
        return cells[:end]

    def _scores(self, slot: Slot, row: Row) -> list[TokenLogprobs]:
        """Return the scores of positions start + 1 to min(start + count, prompt_len - 1)."""
        cells = self._read(slot, row.start + row.count)
        last = min(row.start + row.count, slot.prompt_len - 1)
        return [score(cells[i - 1], slot.tokens[i]) for i in range(row.start + 1, last + 1)]
