"""`Sequence`, one sample of a request while it is generated, and `Request`, the samples that came in one `Submit`.

They hold state and check moves between states. They do not decide who may run, or in which blocks. Any module may read
any part of a sequence, but only the part's owner changes it:

    table                           block_manager.py
    progress                        planner.py and plan_builder.py schedule positions, commit.py commits them
    tokens                          commit.py
    suspicion                       quarantine.py
    state, slot, finish_reason      queues.py, which also rewinds a sequence that has given up its slot
    stats                           whoever sees an event calls the method for it
    checked_at_version              planner.py

The numbers of a `SequenceProgress` are positions, counted from the first token of the prompt:

    0 ── num_computed ── num_scheduled ── num_tokens ── max_num_tokens
         committed       scheduled        tokens that exist or are being sampled by plans in flight

A plan schedules positions from `num_scheduled` on; the row that reaches `num_tokens` samples one more. These numbers
are the only difference between prefill and decode, or between a new sequence and a resumed one.
"""

from array import array
from enum import Enum

import msgspec

from services.scheduler.core.adapters import Adapter
from services.scheduler.core.prefix import Node
from shared.protocol import FinishReason, Sampling, SchedulingInfo, Suspicion, TokenLogprobs

Key = tuple[float, float, int, int]
"""Place in the static order of all sequences; see policy.py."""


class State(Enum):
    """The places where a sequence can be."""

    WAITING = "waiting"  # in the queue: no slot, no blocks, no rows in flight; a swapped one has host blocks
    RUNNING = "running"  # has a slot and blocks, and gets rows
    STOPPING = "stopping"  # gets no more rows, but plans in flight still name its slot and blocks
    FINISHED = "finished"  # holds nothing


MOVES: dict[State, frozenset[State]] = {
    State.WAITING: frozenset({State.RUNNING, State.FINISHED}),
    State.RUNNING: frozenset({State.WAITING, State.STOPPING, State.FINISHED}),
    State.STOPPING: frozenset({State.WAITING, State.FINISHED}),
    State.FINISHED: frozenset(),
}


class SequenceProgress:
    """The progress of a sequence, in positions."""

    __slots__ = (
        "in_flight",
        "max_num_computed",
        "max_num_tokens",
        "num_computed",
        "num_scheduled",
        "num_sent",
        "num_tokens",
        "row_samples",
    )

    def __init__(self, num_tokens: int, max_num_tokens: int, row_samples: int) -> None:
        self.max_num_tokens = max_num_tokens
        self.max_num_computed = max_num_tokens - row_samples  # the last token's position need not be computed
        self.row_samples = row_samples  # tokens sampled by a row that reaches `num_tokens`: 1, or 0 if only scored
        self.num_tokens = num_tokens
        self.num_sent = num_tokens  # tokens that have come to the slot in plans; its own samples count with stages only
        self.num_computed = self.num_scheduled = 0
        self.in_flight = 0  # plans in flight that name the sequence

    @property
    def num_unscheduled(self) -> int:
        """The number of positions that can be scheduled now."""
        return min(self.num_tokens, self.max_num_computed) - self.num_scheduled

    def skip(self, num_cached: int) -> None:
        """Begin behind `num_cached` positions, which the sequence's blocks hold already."""
        self.num_computed = self.num_scheduled = num_cached

    def schedule(self, count: int) -> int:
        """Give the next `count` positions to one row of a plan. Return how many tokens the row samples."""
        self.in_flight += 1
        self.num_scheduled = end = self.num_scheduled + count
        if end != self.num_tokens:
            return 0
        self.num_tokens = end + self.row_samples
        return self.row_samples

    def fork_from(self, parent: "SequenceProgress") -> None:
        """Begin as a fork of `parent`: the plan that samples its next token samples one for this sequence as well."""
        self.in_flight = 1
        self.num_scheduled, self.num_tokens = parent.num_scheduled, parent.num_tokens
        self.num_sent = parent.num_sent

    def commit(self, end: int) -> None:
        """Note that the result of a plan is back, which computed the positions below `end`."""
        self.in_flight -= 1
        self.num_computed = end

    def rewind(self, num_tokens: int) -> None:
        """Begin again, with `num_tokens` tokens to compute and no plan in flight."""
        self.num_tokens = self.num_sent = num_tokens
        self.num_computed = self.num_scheduled = self.in_flight = 0


class BlockTable:
    """The blocks of a sequence, in order, and how far they can be written and are published.

    A swapped sequence has host blocks instead. It goes on behind the tokens in them, and publishes where it would have.
    """

    __slots__ = (
        "blocks",
        "host_blocks",
        "last_node",
        "num_in_host",
        "num_pending_free",
        "num_writable",
        "publish_at",
    )

    def __init__(self) -> None:
        self.clear()

    def clear(self) -> None:
        """Hold no blocks."""
        self.swap([], 0)
        self.publish_at = 0  # value of `num_computed` at which the next block is full and can be published
        self.last_node: Node = ""  # in the prefix index, of the block before that one

    def swap(self, host_blocks: list[int], num_tokens: int) -> None:
        """Hold host blocks instead of blocks; they have the first `num_tokens` tokens."""
        self.blocks: list[int] = []
        self.num_writable = 0  # positions below this one can be written without a new block
        self.num_pending_free = 0  # blocks that come free when the sequence has stopped
        self.host_blocks = host_blocks
        self.num_in_host = num_tokens


class SequenceStats:
    """The numbers of a sequence that progress rows and metrics report."""

    __slots__ = (
        "num_cached_tokens",
        "num_preemptions",
        "num_prompt_counted",
        "num_prompt_logprobs_sent",
        "queued_seconds",
        "scheduling_changed",
    )

    def __init__(self) -> None:
        self.queued_seconds = -1.0  # until its first admission; negative: not admitted yet
        self.num_preemptions = 0
        self.scheduling_changed = False  # since a row has said how the sequence is treated
        self.num_cached_tokens = -1  # prompt tokens found in the index at its first admission; -1: not admitted yet
        self.num_prompt_counted = 0  # prompt tokens counted in the metrics
        self.num_prompt_logprobs_sent = 0  # positions 1 to this one were sent

    def admit(self, queued_seconds: float) -> None:
        """Note an admission. Only the first one is reported."""
        if self.queued_seconds < 0:
            self.queued_seconds = max(queued_seconds, 0.0)
            self.scheduling_changed = True

    def fork_from(self, parent: "SequenceStats") -> None:
        """Note the admission of a fork of `parent`, which shares its wait."""
        self.queued_seconds = parent.queued_seconds
        self.scheduling_changed = True

    def preempt(self) -> None:
        """Note a preemption."""
        self.num_preemptions += 1
        self.scheduling_changed = True

    def note_cached(self, num_tokens: int) -> None:
        """Note the prompt tokens that an admission found in the prefix index. Only the first one is reported."""
        if self.num_cached_tokens < 0:
            self.num_cached_tokens = num_tokens

    def count_prompt_up_to(self, num_tokens: int) -> int:
        """Count the first `num_tokens` tokens of the prompt. Return how many of them were not counted before."""
        new = max(num_tokens - self.num_prompt_counted, 0)
        self.num_prompt_counted += new
        return new

    def take_unsent(self, start: int, logprobs: list[TokenLogprobs]) -> list[TokenLogprobs]:
        """Return those of the prompt's logprobs, from position `start + 1` on, that no earlier row carried."""
        unsent = logprobs[max(self.num_prompt_logprobs_sent - start, 0) :]
        self.num_prompt_logprobs_sent += len(unsent)
        return unsent


class Sequence:
    """A sample of a request, compared and hashed by identity."""

    __slots__ = (
        "checked_at_version",
        "finish_reason",
        "key",
        "progress",
        "prompt_len",
        "request",
        "sample",
        "samples_before",
        "sampling",
        "slot",
        "state",
        "stats",
        "stop_token_ids",
        "suspicion",
        "table",
        "tokens",
    )

    def __init__(self, request: "Request", sample: int, tokens: "array[int]") -> None:
        sampling = request.sampling_of(sample)
        self.request = request
        self.sample = sample
        self.prompt_len = request.prompt_len
        self.sampling = sampling
        self.stop_token_ids = frozenset(sampling.stop_token_ids)
        self.samples_before = request.samples_before + sample
        priority, arrival, serial = request.order_key
        self.key: Key = (priority, arrival + self.samples_before * request.sample_spacing, serial, sample)

        self.tokens = tokens  # prompt and output, as far as committed
        row_samples = 1 if sampling.max_tokens else 0
        self.progress = SequenceProgress(len(tokens), self.prompt_len + sampling.max_tokens, row_samples)
        self.table = BlockTable()
        self.suspicion = Suspicion()  # from workers that died while they ran it
        self.stats = SequenceStats()
        self.state = State.WAITING
        self.slot = -1
        self.finish_reason: FinishReason | None = None  # set when it ends, even if plans in flight still name it
        # free version and number of running sequences when an admission last failed
        self.checked_at_version: tuple[int, int] | None = None

    @property
    def output_len(self) -> int:
        """The number of output tokens committed so far."""
        return len(self.tokens) - self.prompt_len

    def append_token(self, token: int) -> FinishReason | None:
        """Append a sampled token. Return why the sequence ends with it, or None if it goes on."""
        self.tokens.append(token)
        if token in self.stop_token_ids:
            return FinishReason.STOP
        if len(self.tokens) == self.progress.max_num_tokens:
            return FinishReason.LENGTH
        return None

    def suspect(self, suspicion: Suspicion) -> None:
        """Change the suspicion. The next row reports it."""
        if suspicion != self.suspicion:
            self.suspicion = suspicion
            self.stats.scheduling_changed = True

    def take_scheduling(self) -> SchedulingInfo | None:
        """Return the scheduling info for a row, or None if it has not changed since it was last taken."""
        stats = self.stats
        if not stats.scheduling_changed:
            return None
        stats.scheduling_changed = False
        return SchedulingInfo(stats.queued_seconds, stats.num_preemptions, self.suspicion)

    def move(self, state: State) -> None:
        """Go to another state. Raise RuntimeError if that move is illegal."""
        if state not in MOVES[self.state]:
            raise RuntimeError(f"illegal move to {state.value}: {self!r}")
        self.state = state

    def rewind(self) -> None:
        """Forget the slot and all progress; the tokens stay. The block manager must have released the table."""
        self.slot = -1
        self.progress.rewind(len(self.tokens))

    def __repr__(self) -> str:
        progress = self.progress
        numbers = (progress.num_computed, progress.num_scheduled, progress.num_tokens, progress.max_num_tokens)
        reason = f" {self.finish_reason.value}" if self.finish_reason else ""
        where = f"{self.state.value}{reason} {'/'.join(map(str, numbers))} slot={self.slot}"
        return f"<Sequence {self.request.id}.{self.sample} {where}>"


class Request:
    """The request of one `Submit`. Its samples share the prompt, and take turns with other requests.

    queues.py owns which of its samples have started and which are unfinished.
    """

    __slots__ = (
        "accepted_at",
        "adapter",
        "id",
        "order_key",
        "prefix_root",
        "priority",
        "prompt_len",
        "request_id",
        "sample_spacing",
        "samples_before",
        "sampling",
        "unfinished",
        "unstarted_samples",
    )

    def __init__(
        self,
        id: int,
        prompt_len: int,
        sampling: Sampling,
        order_key: tuple[float, float, int],
        priority: int = 0,
        accepted_at: float = 0.0,
        samples_before: int = 0,
        sample_spacing: float = 0.0,
        request_id: str = "",
        cache_salt: str = "",
        adapter: Adapter | None = None,
    ) -> None:
        self.id = id
        self.request_id = request_id  # the id that the client sees
        self.prompt_len = prompt_len
        self.sampling = sampling
        self.adapter = adapter  # that it uses
        self.prefix_root = f"{adapter.number if adapter else 0}:{cache_salt}"  # of the prefix index, for its prompt
        self.order_key = order_key
        self.priority = priority
        self.accepted_at = accepted_at
        self.samples_before = samples_before  # samples of the same user's request in earlier `Submit`s
        self.sample_spacing = sample_spacing  # seconds by which each sample counts as later than the one before
        self.unfinished: dict[int, Sequence] = {}  # sequences by sample index
        self.unstarted_samples: list[int] = []  # sample indices that start when the prompt has been computed once

    def start(self, sample: int, tokens: "array[int]") -> Sequence:
        """Return a new sequence for a sample. It waits, and is in no queue yet."""
        sequence = Sequence(self, sample, tokens)
        self.unfinished[sample] = sequence
        return sequence

    def sampling_of(self, sample: int) -> Sampling:
        """Return the sampling of one sample. Only sample 0 scores the prompt, so the others may take prefix hits."""
        if sample == 0 or self.sampling.prompt_logprobs < 0:
            return self.sampling
        return msgspec.structs.replace(self.sampling, prompt_logprobs=-1)

    def __repr__(self) -> str:
        return f"<Request {self.id} unfinished={list(self.unfinished)} unstarted={self.unstarted_samples}>"
