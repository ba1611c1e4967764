"""`Draft`, the plan being made, and `Flight`, what the core keeps of a plan until its result is back.

They collect and remember; nothing is decided here.
"""

from typing import NamedTuple

from services.scheduler.core.sequence import Sequence
from shared.protocol import Epoch, Fork, NewSequence, Row, StepPlan, TableWrite, pack_tokens


class Flight(NamedTuple):
    """A plan whose result is not back. Row i is of sequence i; a fork's child has an empty row behind the prompt."""

    step: int
    rows: list[Row]
    sequences: list[Sequence]
    pins: list[int]  # blocks that the plan copies from
    tokens: int  # positions that it computes


class Draft:
    """A plan in the making."""

    __slots__ = ("copies", "forks", "new", "newborn", "rows", "sequences", "tokens", "writes")

    def __init__(self) -> None:
        self.rows: list[Row] = []
        self.sequences: list[Sequence] = []
        self.tokens = 0  # positions of all rows
        self.new: list[NewSequence] = []
        self.forks: list[Fork] = []
        self.newborn: list[Sequence] = []
        self.writes: list[TableWrite] = []
        self.copies: list[tuple[int, int]] = []

    def admit(self, sequence: Sequence) -> None:
        """The sequence enters its slot."""
        tokens = pack_tokens(sequence.tokens)
        blocks = list(sequence.blocks)  # the table grows on, the message does not
        self.new.append(
            NewSequence(sequence.slot, tokens, sequence.prompt_len, blocks, sequence.sampling, sequence.sample)
        )

    def add_row(self, sequence: Sequence, count: int) -> None:
        """Hand out the next `count` positions."""
        start = sequence.planned
        end = start + count
        samples = sequence.samples if end == sequence.known else 0
        self.rows.append(Row(sequence.slot, start, count, samples))
        self.sequences.append(sequence)
        self.tokens += count
        sequence.planned = end
        sequence.known += samples
        sequence.in_flight += 1

    def fork(self, parent: Sequence, children: list[Sequence]) -> None:
        """The children's slots begin as copies of the parent's, which has a sampling row here."""
        self.forks.append(Fork(parent.slot, [(child.slot, child.sample) for child in children]))
        self.newborn += children

    def plan(self, epoch: Epoch, step: int, released: list[int]) -> StepPlan:
        """The message."""
        return StepPlan(epoch, step, self.rows, self.new, self.forks, self.writes, self.copies, released)

    def flight(self, step: int) -> Flight:
        """What is to be remembered of it."""
        children = [Row(child.slot, child.planned, 0, 1) for child in self.newborn]
        pins = [source for source, _ in self.copies]
        return Flight(step, self.rows + children, self.sequences + self.newborn, pins, self.tokens)
