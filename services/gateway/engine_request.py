"""`EngineRequest`: a request and the rows that have come for it. It owns no socket and no task.

It outlives the engine that runs it. It keeps its prompt and the output so far, so what an engine has not finished can
be submitted again, to another one or to the same when it is back, under a new id. Noise is a function of seed, sample
and position, so the output goes on with the same tokens.

A request that loses engine after engine without new output fails, so that one which ends engines ends some only.

Each row has the output position of its tokens. A row whose tokens have come before is dropped. If tokens are missing,
the request fails, since a stream with a gap must not continue. So it does if there are more tokens than it asked for.
"""

import asyncio
import time
from array import array
from collections.abc import Callable, Iterator
from typing import Protocol, TypedDict

from msgspec import Struct
from msgspec.structs import replace

from shared.errors import EngineFailure, QuireError
from shared.protocol import FinishReason, ProgressRow, Sampling, SchedulingInfo, Submit, Suspicion, pack_tokens

MAX_LOSSES = 5
"""Times in a row that a request may lose its engine before it has new output. It may be what ends the engines."""


class Engine(Protocol):
    """An engine to which a request is submitted."""

    @property
    def name(self) -> str: ...
    def abort(self, id: int, sample: int = -1) -> None:
        """Send an `Abort`."""


class Attempt(Struct, eq=False):
    """One `Submit`, and the samples that the engine has not finished."""

    id: int  # at the engine
    engine: Engine
    samples: set[int]
    size: int  # the number of samples at first


class Interruption(Struct):
    """A pause of a request that lost its engine. Times are seconds of the monotonic clock."""

    engine: str  # that was lost
    reason: str
    samples: list[int]  # that ran there
    began: float
    placed: float | None = None  # when the samples were submitted again
    next_engine: str = ""  # where to
    ended: float | None = None  # when the first of them had new output


class _Sample:
    """An unfinished sample: what has come of it, so that it can be submitted again."""

    def __init__(self, output: "array[int]") -> None:
        self.output = output
        self.cached_tokens = -1  # of its first row
        self.scheduling: SchedulingInfo | None = None  # by all engines
        self.suspicion = Suspicion()  # as the last engine that reported one left it
        self.preemptions_before = 0  # at earlier engines
        self._reported: SchedulingInfo | None = None  # what the reader knows of `scheduling`
        self.waited = 0.0  # seconds from the request's beginning to the present attempt

    def begin_attempt(self, waited: float) -> None:
        """Note that the next rows come from another attempt, which begins `waited` seconds after the request."""
        self.preemptions_before = self.scheduling.preemptions if self.scheduling else 0
        self.waited = waited

    @property
    def has_news(self) -> bool:
        """True if there is something for `take_scheduling` to return."""
        return self.scheduling is not self._reported

    def note_scheduling(self, scheduling: SchedulingInfo) -> None:
        """Note how the last engine treats the sample. Its suspicion is for the next engine, and not for the reader."""
        queued = self.scheduling.queued_seconds if self.scheduling else self.waited + scheduling.queued_seconds
        by_all = SchedulingInfo(queued, self.preemptions_before + scheduling.preemptions)
        if by_all != self.scheduling:
            self.scheduling = by_all
        self.suspicion = scheduling.suspicion

    def take_scheduling(self) -> SchedulingInfo | None:
        """Return the treatment by all engines for the reader, or None if that has not changed."""
        news = self.scheduling if self.has_news else None
        self._reported = self.scheduling
        return news


class RequestOptions(TypedDict, total=False):
    """Options of a request, besides its prompt and sampling."""

    n: int  # samples
    priority: int
    samples_before: int  # of the same user's earlier requests
    request_id: str  # under which all services log it
    cache_salt: str  # it shares cached blocks with requests of the same one only
    adapter: str  # the name of the adapter that it uses; empty: none
    output: "array[int] | None"  # that its one sample continues
    after: "EngineRequest | None"  # of the same user's, accepted: this one has its arrival, and is not refused for load


class EngineRequest:
    """A request of `n` samples. Connections add rows, and one task reads or follows them.

    `on_unplaced` is called when samples are at no engine any more and the request has not ended, `on_first_token` when
    the first token of any sample has come.
    """

    def __init__(
        self,
        tokens: "array[int]",
        sampling: Sampling,
        *,
        n: int = 1,
        priority: int = 0,
        samples_before: int = 0,
        request_id: str = "",
        cache_salt: str = "",
        adapter: str = "",
        output: "array[int] | None" = None,
        after: "EngineRequest | None" = None,
        on_unplaced: Callable[["EngineRequest"], None] = lambda request: None,
        on_first_token: Callable[["EngineRequest"], None] = lambda request: None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """`samples_before` counts the samples of the same user's earlier requests. `request_id` is for logs.

        The one sample of a request with `output` continues that. A request `after` another one of the same user's,
        which an engine has accepted, takes its place in the order and is not refused for load.
        """
        self.request_id = request_id
        self.cache_salt = cache_salt
        self.adapter = adapter  # its name; empty: it uses none
        self.adapter_digest: str = after.adapter_digest if after else ""  # of the files with which the output began
        self.arrival: float = after.arrival if after else time.time()
        self.accepted = after is not None  # by an engine, now or before
        self.waiting_since: float | None = None  # for an engine, by the monotonic clock; None: it has one
        self.engine = ""  # the name of the last engine
        self.interruptions: list[Interruption] = []
        self.recoveries: list[Interruption] = []  # those that have ended; the reader takes them out
        self.num_losses = 0  # times that an engine was lost which had it, since its last output
        self._clock = clock
        self._began = clock()
        self.outputs = [array("i", output or ()) for _ in range(n)]  # so far, of each sample
        self._tokens, self._sampling, self._n = tokens, sampling, n
        self._priority, self._samples_before = priority, samples_before
        self._on_unplaced, self._on_first_token = on_unplaced, on_first_token
        self._samples = {sample: _Sample(output) for sample, output in enumerate(self.outputs)}  # the unfinished ones
        self._attempts: list[Attempt] = []
        self._num_prompt_logprobs = 0  # given to the reader
        self._skip_prompt_logprobs = 0  # that the present attempt will send again
        self._rows: list[ProgressRow] = []
        self._error: QuireError | None = None
        self._loop = asyncio.get_running_loop()  # kept, since get_running_loop is a system call
        self._waiter: asyncio.Future[None] | None = None  # the reader waits on it
        self._take: Callable[[list[ProgressRow]], bool] | None = None  # of the reader, if it follows

    def __repr__(self) -> str:
        outputs = {index: len(sample.output) for index, sample in self._samples.items()}
        return f"<EngineRequest at {self.engine or 'no engine'}, tokens of running samples: {outputs}>"

    @property
    def prompt(self) -> "array[int]":
        return self._tokens

    @property
    def sampling(self) -> Sampling:
        return self._sampling

    @property
    def cache_root(self) -> str:
        """Return what requests must have in common, besides tokens, to share cached blocks."""
        return f"{self.adapter}:{self.cache_salt}"

    @property
    def max_length(self) -> int:
        """Return the number of tokens that a sample may have in the end, by which an engine judges if it fits."""
        return len(self._tokens) + self._sampling.max_tokens

    @property
    def done(self) -> bool:
        """Return whether nothing more comes for this request."""
        return not self._samples or self._error is not None

    @property
    def has_output(self) -> bool:
        """Return whether an unfinished sample has output."""
        return any(sample.output for sample in self._samples.values())

    @property
    def unplaced(self) -> list[int]:
        """Return the unfinished samples that are at no engine."""
        placed = {sample for attempt in self._attempts for sample in attempt.samples}
        return [sample for sample in self._samples if sample not in placed]

    async def wait_accepted(self) -> None:
        """Return as soon as an engine has accepted the request, or has sent a first row.

        Raise as `rows` does if the request ended before that.
        """
        while not (self.accepted or self._rows or self.done):
            await self._wait()
        if self._error is not None and not self._rows:
            raise self._error

    async def rows(self) -> list[ProgressRow]:
        """Return the rows that have come since the last call, waiting for one if there are none.

        When there are no more rows, raise `Overloaded`, `InvalidRequest` or `Unavailable` if no engine takes the
        request, and `EngineFailure` if it cannot go on. Do not call this after each sample has had its last row or was
        aborted.
        """
        if not self._rows and not self._samples:
            raise RuntimeError(f"{self!r} has ended")
        while not self._rows and self._error is None:
            await self._wait()
        if not self._rows and self._error is not None:
            raise self._error
        rows, self._rows = self._rows, []
        return rows

    async def follow(self, take: Callable[[list[ProgressRow]], bool]) -> None:
        """Pass rows to `take` as they come, until it returns false. Raise what `rows` and `take` raise.

        `deliver` calls it, so that no task is woken for a row.
        """
        self._take, self._waiter = take, self._loop.create_future()
        try:
            self.deliver()
            await self._waiter
        finally:
            self._take = None

    def deliver(self) -> None:
        """Give the reader the rows that have come, and then the error. Call this after `add`, once for several rows."""
        take, waiter = self._take, self._waiter
        if waiter is None or waiter.done():
            return
        if take is None:
            waiter.set_result(None)
            return
        rows, self._rows = self._rows, []
        try:
            goes_on = not rows or take(rows)
            if goes_on and self._error is not None:
                raise self._error
        except Exception as error:
            waiter.set_exception(error)
        else:
            if not goes_on:
                waiter.set_result(None)

    def abort(self, sample: int) -> None:
        """End one sample, and drop its rows. Idempotent."""
        if sample in self._samples and self._error is None:
            del self._samples[sample]
            self._rows = [row for row in self._rows if row.sample != sample]
            if (attempt := self._take_from_attempt(sample)) is not None:
                attempt.engine.abort(attempt.id, sample)

    def place(self, engine: Engine, ids: Iterator[int]) -> list[Submit]:
        """Return what to send to `engine`, so that it runs the samples that are at no engine, under new `ids`.

        Samples that have output, or whose companions have ended, are submitted one by one.
        """
        unplaced = self.unplaced
        whole = len(unplaced) == self._n and not self.has_output
        groups = [unplaced] if whole else [[sample] for sample in unplaced]
        self.engine = engine.name
        if 0 in unplaced:  # the sample that has them
            self._skip_prompt_logprobs = self._num_prompt_logprobs
        now = self._clock()
        for sample in unplaced:
            self._samples[sample].begin_attempt(now - self._began)
        for interruption in self.interruptions:
            if interruption.placed is None:
                interruption.placed, interruption.next_engine = now, engine.name
        return [self._submit(group, engine, next(ids)) for group in groups]

    def attempts_at(self, engine: Engine) -> list[Attempt]:
        return [attempt for attempt in self._attempts if attempt.engine is engine]

    def lose(self, engine: Engine, reason: str = "it was lost") -> None:
        """Note that nothing more comes from `engine`, which was lost. Fail if that is one loss too many."""
        self.num_losses += 1
        if self.num_losses == MAX_LOSSES:
            self.fail(EngineFailure(f"{MAX_LOSSES} engines in a row were lost with it, the last one because {reason}"))
        self.leave(engine, reason)

    def leave(self, engine: Engine, reason: str) -> None:
        """Take the request from `engine`, which hands it over."""
        self._attempts = [attempt for attempt in self._attempts if attempt.engine is not engine]
        self._interrupt(reason)
        self._report_unplaced()

    def reject(self, engine: Engine, id: int) -> None:
        """Note that `engine` does not take the attempt `id`, and another one may."""
        self._attempts = [one for one in self._attempts if one.engine is not engine or one.id != id]
        self._report_unplaced()

    def accept(self) -> None:
        """Note that the engine has queued the request."""
        self.accepted, self.waiting_since = True, None
        self.deliver()

    def add(self, row: ProgressRow) -> None:
        """Keep a row for `deliver`, unless the sample has ended or its tokens have come before."""
        sample = self._samples.get(row.sample)
        if sample is None or self._error is not None:
            return
        if row.scheduling is not None:
            sample.note_scheduling(row.scheduling)
        reason = row.finish_reason
        if reason is not None and reason is FinishReason.ABORT:  # not by this gateway: the engine ends
            self._take_from_attempt(row.sample)
            self._interrupt("it has ended")
            self._report_unplaced()
            return
        tokens, num_received = row.tokens, len(sample.output)
        if tokens and row.position != num_received:
            if row.position > num_received:
                self._abandon(f"tokens {num_received} to {row.position - 1} of the output were lost")
            return
        if num_received + len(tokens) > self._sampling.max_tokens:  # no engine can fill this process's memory
            self._abandon(f"the engine sent more than the {self._sampling.max_tokens} tokens that it was asked for")
            return
        if row.prompt_logprobs:
            row = self._without_known_logprobs(row)
        if not (tokens or row.prompt_logprobs or reason):  # nothing for which to wake the reader
            return
        if row.scheduling is not None or row.cached_tokens != sample.cached_tokens or sample.has_news:
            row = self._continued(row, sample)
        is_first = not num_received and tokens and not any(self.outputs)
        sample.output.extend(tokens)
        if is_first:
            self._on_first_token(self)
        if self.interruptions:
            self._end_interruptions(row)
        if reason is not None:
            del self._samples[row.sample]
            self._take_from_attempt(row.sample)
        self.accepted, self.waiting_since, self.num_losses = True, None, 0
        self._rows.append(row)

    def refuse(self, error: QuireError) -> None:
        """End the request with `error`, since no engine takes it. If one has accepted it before, that is a failure."""
        self.fail(EngineFailure(f"the engine was lost, and {error}") if self.accepted else error)

    def fail(self, error: QuireError) -> None:
        """End the request with `error`, which the reader gets after the rows that have come. Idempotent."""
        if not self.done:
            self._error = error
            self.deliver()

    def _abandon(self, reason: str) -> None:
        """Abort everything, and fail, since the engine cannot be right."""
        for attempt in self._attempts:
            attempt.engine.abort(attempt.id)
        self.fail(EngineFailure(reason))

    def _submit(self, samples: list[int], engine: Engine, id: int) -> Submit:
        self._attempts.append(Attempt(id, engine, set(samples), len(samples)))
        first = samples[0]
        scored = first == 0 and self._num_prompt_logprobs < len(self._tokens) - 1
        return Submit(
            id=id,
            tokens=pack_tokens(self._tokens + self._samples[first].output),
            prompt_len=len(self._tokens),
            sampling=self._sampling if scored else replace(self._sampling, prompt_logprobs=-1),
            n=len(samples),
            sample=first,
            priority=self._priority,
            arrival=self.arrival,
            samples_before=self._samples_before,
            resumed=self.accepted,
            request_id=self.request_id,
            suspicion=max((self._samples[sample].suspicion for sample in samples), key=_weight),
            cache_salt=self.cache_salt,
            adapter=self.adapter,
            adapter_digest=self.adapter_digest if self.has_output else "",
        )

    def _without_known_logprobs(self, row: ProgressRow) -> ProgressRow:
        """Return a row without those of the prompt's log-probabilities that an earlier engine has sent."""
        if row.prompt_logprobs and self._skip_prompt_logprobs:
            known = min(self._skip_prompt_logprobs, len(row.prompt_logprobs))
            self._skip_prompt_logprobs -= known
            row = replace(row, prompt_logprobs=row.prompt_logprobs[known:] or None)
        self._num_prompt_logprobs += len(row.prompt_logprobs or ())
        return row

    def _continued(self, row: ProgressRow, sample: _Sample) -> ProgressRow:
        """Return a row as it would be if one engine had run the request from its beginning."""
        if sample.cached_tokens < 0:
            sample.cached_tokens = row.cached_tokens
        elif row.cached_tokens != sample.cached_tokens:
            row = replace(row, cached_tokens=sample.cached_tokens)
        if row.scheduling is not None or sample.has_news:
            row = replace(row, scheduling=sample.take_scheduling())
        return row

    def _take_from_attempt(self, sample: int) -> Attempt | None:
        """Take a sample from the attempt that has it, and return that attempt; None if the sample is at no engine."""
        for attempt in self._attempts:
            if sample in attempt.samples:
                attempt.samples.remove(sample)
                return attempt
        return None

    def _interrupt(self, reason: str) -> None:
        """Note that samples have lost their engine, the last one. What it never accepted has lost nothing."""
        lost = [sample for sample in self.unplaced if self.accepted]
        if self.interruptions and self.interruptions[-1].placed is None:
            self.interruptions[-1].samples = lost  # an engine that ends says so for one sample after the other
        elif lost and not self.done:
            self.interruptions.append(Interruption(self.engine, reason, lost, self._clock()))

    def _end_interruptions(self, row: ProgressRow) -> None:
        """Note that a sample goes on, if `row` has new output of it."""
        for interruption in self.interruptions:
            if interruption.ended is None and row.sample in interruption.samples and row.tokens:
                interruption.ended = self._clock()
                self.recoveries.append(interruption)

    def _report_unplaced(self) -> None:
        if not self.done and self.unplaced:
            self._on_unplaced(self)

    async def _wait(self) -> None:
        self._waiter = self._loop.create_future()
        await self._waiter


def _weight(suspicion: Suspicion) -> tuple[int, int]:
    """Return what makes one suspicion graver than another: of several samples, the gravest one goes with them."""
    return suspicion.deaths_alone, suspicion.cleared_at
