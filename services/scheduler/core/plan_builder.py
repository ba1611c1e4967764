"""`PlanBuilder`, which collects one step's plan, and `InFlightPlan`, the part of it kept until its result is back.

The planner decides what goes into a plan.
"""

from typing import NamedTuple

from services.scheduler.core.adapters import Adapter
from services.scheduler.core.host_tier import Move
from services.scheduler.core.sequence import Sequence
from shared.protocol import Epoch, Fork, NewSequence, Row, StepPlan, TableWrite, pack_tokens


class InFlightPlan(NamedTuple):
    """A plan whose result is not back. `rows[i]` is of `sequences[i]`; a fork's child has a row without positions."""

    step: int
    rows: list[Row]
    sequences: list[Sequence]
    pinned_blocks: list[int]  # blocks that the plan copies from
    host_blocks: list[int]  # that it copies to or from, in the order in which they come free
    num_tokens: int  # positions to compute, of all rows
    num_chunked: int  # those of rows of more than one


class PlanBuilder:
    """A plan that is not finished yet."""

    __slots__ = (
        "adapter_slots",
        "block_copies",
        "children",
        "forks",
        "new_sequences",
        "num_chunked",
        "num_deferred",
        "num_skipped",
        "num_tokens",
        "rows",
        "sampled",
        "sequences",
        "swap_in",
        "swap_out",
        "table_writes",
    )

    def __init__(self) -> None:
        self.rows: list[Row] = []
        self.sequences: list[Sequence] = []
        self.num_tokens = 0  # positions of all rows
        self.num_chunked = 0  # positions of rows of more than one
        self.num_skipped = 0  # running sequences that get no row because a block is missing, one each
        self.num_deferred = 0  # those that go on with their output in another plan than this
        self.new_sequences: list[NewSequence] = []
        self.forks: list[Fork] = []
        self.children: list[Sequence] = []
        self.table_writes: list[TableWrite] = []
        self.block_copies: list[tuple[int, int]] = []
        self.adapter_slots: list[tuple[int, int]] = []
        self.sampled: list[tuple[int, int]] = []
        self.swap_out: list[Move] = []
        self.swap_in: list[Move] = []

    def add_sequence(self, sequence: Sequence) -> None:
        """Put a sequence that has been admitted into its slot."""
        tokens = pack_tokens(sequence.tokens)
        blocks = list(sequence.table.blocks)  # a copy, since the table grows on
        adapter = sequence.request.adapter
        self.new_sequences.append(
            NewSequence(
                sequence.slot,
                tokens,
                sequence.prompt_len,
                blocks,
                sequence.sampling,
                sequence.sample,
                sequence.request.request_id,
                adapter_slot=-1 if adapter is None else adapter.slot,
            )
        )

    def add_rows(self, sequences: list[Sequence], count: int) -> None:
        """Add a row for the next `count` positions of each sequence."""
        for sequence in sequences:
            progress = sequence.progress
            self.rows.append(Row(sequence.slot, progress.num_scheduled, count, progress.schedule(count)))
        self.sequences += sequences
        self.num_tokens += len(sequences) * count
        if count > 1:
            self.num_chunked += len(sequences) * count

    def send_sampled(self, sequences: list[Sequence]) -> None:
        """Tell the ranks the token at the next position of each sequence, if it was sampled and they were not told."""
        for sequence in sequences:
            progress = sequence.progress
            if (position := progress.num_scheduled) == progress.num_sent:
                self.sampled.append((sequence.slot, sequence.tokens[position]))
                progress.num_sent += 1

    def defer(self) -> None:
        """Note that a running sequence goes on with its output in another plan."""
        self.num_deferred += 1

    def skip(self) -> None:
        """Note that a running sequence waits for a block in this step."""
        self.num_skipped += 1

    def fork(self, parent: Sequence, children: list[Sequence]) -> None:
        """Begin the children's slots as copies of the parent's, which has a sampling row in this plan."""
        self.forks.append(Fork(parent.slot, [(child.slot, child.sample) for child in children]))
        for child in children:
            child.progress.fork_from(parent.progress)
        self.children += children

    def write_table(self, slot: int, index: int, block: int) -> None:
        """Have the worker put a block into the table of a slot."""
        self.table_writes.append(TableWrite(slot, index, [block]))

    def copy_block(self, source: int, destination: int) -> None:
        """Have the worker copy a block before it computes. The source must be pinned."""
        self.block_copies.append((source, destination))

    def put_adapter(self, adapter: Adapter) -> None:
        """Have the worker put an adapter into the slot that was assigned to it."""
        self.adapter_slots.append((adapter.slot, adapter.number))

    def swap(self, swap_out: list[Move], swap_in: list[Move]) -> None:
        """Have the worker copy blocks to host memory, before it copies others, and host blocks back after that."""
        self.swap_out, self.swap_in = swap_out, swap_in

    def build(self, epoch: Epoch, step: int, released_slots: list[int]) -> StepPlan:
        """Return the message to the workers."""
        return StepPlan(
            epoch,
            step,
            self.rows,
            self.new_sequences,
            self.forks,
            self.table_writes,
            self.block_copies,
            released_slots,
            self.swap_out,
            self.swap_in,
            self.adapter_slots,
            self.sampled,
        )

    def in_flight_plan(self, step: int) -> InFlightPlan:
        """Return the part of the plan that is kept until its result is back."""
        child_rows = [Row(child.slot, child.progress.num_scheduled, 0, 1) for child in self.children]
        pinned_blocks = [source for source, _ in self.block_copies]
        # the beginning of a prompt, which the device reuses last and gets back first, comes free last
        host_blocks = [destination for _, destination in self.swap_out]
        host_blocks += [source for source, _ in reversed(self.swap_in)]
        return InFlightPlan(
            step,
            self.rows + child_rows,
            self.sequences + self.children,
            pinned_blocks,
            host_blocks,
            self.num_tokens,
            self.num_chunked,
        )
