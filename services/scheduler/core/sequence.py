"""`Sequence`, one stream of tokens being made, and `Request`, the samples that came in one `Submit`.

They hold numbers and check moves between states; who may run, and in which blocks, is decided elsewhere.

How the numbers of a sequence stand to each other (positions, counted from the first token of the prompt):

    0 ───── computed ───── planned ───── known ───── limit
            committed      handed out    tokens that exist or are being sampled by plans in flight

A plan hands out positions from `planned` on; the row that reaches `known` samples one more. Nothing else tells a
prompt from an output, or a new sequence from a resumed one.
"""

from array import array
from enum import Enum

import msgspec

from shared.protocol import FinishReason, Sampling, SchedulingInfo

Key = tuple[float, float, int, int]
"""Place in the one static order; see policy.py."""


class State(Enum):
    """Where a sequence is."""

    WAITING = "waiting"  # in the queue: no slot, no blocks, in no plan in flight
    RUNNING = "running"  # has a slot and blocks, and gets rows
    DRAINING = "draining"  # gets no more rows, but plans in flight still name its slot and blocks
    FINISHED = "finished"  # holds nothing


MOVES: dict[State, frozenset[State]] = {
    State.WAITING: frozenset({State.RUNNING, State.FINISHED}),
    State.RUNNING: frozenset({State.WAITING, State.DRAINING, State.FINISHED}),
    State.DRAINING: frozenset({State.WAITING, State.FINISHED}),
    State.FINISHED: frozenset(),
}


class Sequence:
    """One sample of a request. Compared and hashed by identity."""

    __slots__ = (
        "blocks",
        "cached_tokens",
        "chain",
        "coming",
        "computed",
        "end",
        "finish_reason",
        "in_flight",
        "key",
        "known",
        "limit",
        "next_full",
        "planned",
        "preemptions",
        "prompt_len",
        "prompt_logprobs_sent",
        "prompt_seen",
        "proof",
        "queued",
        "request",
        "room",
        "sample",
        "samples",
        "samples_before",
        "sampling",
        "scheduling",
        "slot",
        "state",
        "stops",
        "strikes",
        "tokens",
        "tried",
    )

    def __init__(self, request: "Request", sample: int, tokens: "array[int]") -> None:
        sampling = request.sampling_of(sample)
        self.request = request
        self.sample = sample
        self.tokens = tokens  # prompt and output, as far as committed
        self.prompt_len = request.prompt_len
        self.sampling = sampling
        self.samples_before = request.samples_before + sample
        first, arrival, serial = request.rank
        self.key: Key = (first, arrival + self.samples_before * request.spread, serial, sample)
        self.stops = frozenset(sampling.stop_token_ids)
        self.samples = 1 if sampling.max_tokens else 0  # tokens sampled by a row that reaches `known`
        self.limit = self.prompt_len + sampling.max_tokens  # `known` never passes it
        self.end = self.limit - self.samples  # positions that need computing at all: the last token's does not
        self.state = State.WAITING
        self.finish_reason: FinishReason | None = (
            None  # set as soon as the sequence is at its end, whatever is still in flight
        )

        self.slot = -1
        self.in_flight = 0  # plans that name it
        self.blocks: list[int] = []  # its table
        self.computed = 0
        self.planned = 0
        self.known = len(tokens)
        self.room = 0  # positions below this one can be written without a new block
        self.chain = 0  # serial, in the prefix index, of the last block below `next_full`
        self.next_full = 0  # `computed` from which on the next block is to be published
        self.coming = 0  # blocks that will be free when it has drained

        self.queued = -1.0  # seconds to its first admission; negative: not admitted yet
        self.preemptions = 0
        self.scheduling: SchedulingInfo | None = None  # to be sent with the next row
        self.cached_tokens = -1  # found in the index at its first admission; -1: not admitted yet
        self.prompt_seen = 0  # prompt positions counted in the metrics
        self.prompt_logprobs_sent = 0  # positions 1 to this one were delivered
        self.tried: tuple[int, int] | None = None  # state of the memory at the last admission that failed
        self.strikes = 0  # workers that died while they ran nothing else
        self.proof = 0  # position it must get past to be no suspect in a worker's death

    @property
    def left(self) -> int:
        """Positions that could be handed out now."""
        return min(self.known, self.end) - self.planned

    @property
    def output_len(self) -> int:
        """Output tokens committed so far."""
        return len(self.tokens) - self.prompt_len

    def note_admission(self, now: float) -> None:
        """Note that it is admitted, for the first time or again."""
        if self.queued < 0:
            self.queued = max(now - self.request.accepted, 0.0)
            self._report_admission()

    def note_admission_with(self, parent: "Sequence") -> None:
        """Note that it is admitted as a fork of `parent`, whose work it shares."""
        self.queued = parent.queued
        self._report_admission()

    def note_preemption(self) -> None:
        """Note that it has to give up its blocks."""
        self.preemptions += 1
        self._report_admission()

    def _report_admission(self) -> None:
        """Have the next row carry how the sequence came to run."""
        self.scheduling = SchedulingInfo(self.queued, self.preemptions)

    def move(self, state: State) -> None:
        """Go to another state; RuntimeError if no such move is legal."""
        if state not in MOVES[self.state]:
            raise RuntimeError(f"illegal move to {state.value}: {self!r}")
        self.state = state

    def rewind(self) -> None:
        """Forget all that depends on blocks and plans; tokens stay."""
        self.slot = -1
        self.in_flight = self.computed = self.planned = self.room = self.chain = self.next_full = self.coming = 0
        self.blocks = []
        self.known = len(self.tokens)
        self.tried = None

    def __repr__(self) -> str:
        where = f"{self.computed}/{self.planned}/{self.known}/{self.limit}"
        fate = f" {self.finish_reason.value}" if self.finish_reason else ""
        return f"<Sequence {self.request.id}.{self.sample} {self.state.value}{fate} {where} slot={self.slot}>"


class Request:
    """The request of one `Submit`: its samples share the prompt, and take their places in the order by turns."""

    __slots__ = (
        "accepted",
        "id",
        "live",
        "priority",
        "prompt_len",
        "rank",
        "samples_before",
        "sampling",
        "spread",
        "unborn",
    )

    def __init__(
        self,
        id: int,
        prompt_len: int,
        sampling: Sampling,
        rank: tuple[float, float, int],
        priority: int = 0,
        accepted: float = 0.0,
        samples_before: int = 0,
        spread: float = 0.0,
    ) -> None:
        self.id = id
        self.prompt_len = prompt_len
        self.sampling = sampling
        self.rank = rank
        self.priority = priority
        self.accepted = accepted  # time
        self.samples_before = samples_before  # samples of the same user's request before sample 0 of this one
        self.spread = spread  # seconds by which each sample's place is behind that of the one before
        self.live: dict[int, Sequence] = {}  # by sample index
        self.unborn: list[int] = []  # samples that begin when the prompt has been computed once

    def spawn(self, sample: int, tokens: "array[int]") -> Sequence:
        """A sequence of this request, waiting."""
        sequence = Sequence(self, sample, tokens)
        self.live[sample] = sequence
        return sequence

    def sampling_of(self, sample: int) -> Sampling:
        """The prompt is scored for sample 0 alone, so that the others may take prefix hits."""
        if sample == 0 or self.sampling.prompt_logprobs < 0:
            return self.sampling
        return msgspec.structs.replace(self.sampling, prompt_logprobs=-1)

    def __repr__(self) -> str:
        return f"<Request {self.id} live={list(self.live)} unborn={self.unborn}>"
