"""`Generation`: one prompt at an engine. It turns the engine's rows into text, metrics and errors.

A generation runs for the time of a `submit` block. However the block ends, the unfinished samples are aborted at the
engine, and each sample is recorded in the metrics once.
"""

import logging
import time
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from contextlib import AbstractAsyncContextManager, asynccontextmanager, contextmanager
from functools import cached_property

from msgspec import Struct

from services.gateway import beam_request
from services.gateway.backend import Backend, EngineRequest
from services.gateway.beam_request import BeamRequest
from services.gateway.gateway import Gateway
from services.gateway.metrics import EngineMetrics, Metrics, SampleTimes
from services.gateway.prompt import PreparedPrompt
from services.gateway.template_hint import hint_at_template
from services.gateway.tracing import current_trace
from shared.errors import EngineFailure, InvalidRequest, Overloaded, Unavailable
from shared.log_format import of_request
from shared.protocol import NOTHING_LEFT, FinishReason, ProgressRow
from shared.text.logprobs import LogprobEntry
from shared.text.message_parser import MessageParser
from shared.text.request_text import RequestText
from shared.text.sample_text import SampleText
from shared.text.tokenizer import Tokenizer

logger = logging.getLogger(__name__)

REFUSALS = (Overloaded, InvalidRequest, Unavailable)


class Update(Struct, frozen=True, gc=False):
    """New text of one sample. Once the last update is made, the sample has its `finish_reason`."""

    sample: int
    text: str
    logprobs: list[LogprobEntry]


def merge(updates: Sequence[Update]) -> Update:
    """Return one update for several of a sample that come one after the other."""
    if len(updates) == 1:
        return updates[0]
    logprobs = [entry for update in updates for entry in update.logprobs]
    return Update(updates[0].sample, "".join(update.text for update in updates), logprobs)


class Generation:
    """The samples of one prompt at an engine. Await `updates` until `text.finished`."""

    def __init__(
        self, prompt: PreparedPrompt, request: EngineRequest | BeamRequest, tokenizer: Tokenizer, metrics: Metrics
    ) -> None:
        self.prompt = prompt
        self.text = RequestText(
            tokenizer,
            prompt.tokens,
            prompt.params,
            prompt.sampling.stop_token_ids,
            echo_length=None if prompt.echo is None else len(prompt.echo),
            offsets=prompt.offsets,  # where each token begins in the prompt's text, in characters
            shown_special=frozenset() if prompt.format is None else prompt.format.token_ids,
        )
        self.parsers: list[MessageParser] = (
            [] if prompt.format is None else [prompt.format.parser() for _ in self.text.samples]
        )  # one for each sample, if its text has other parts than content; the endpoint feeds them
        self.logprobs: list[list[LogprobEntry]] = [
            [] for _ in self.text.samples
        ]  # of each sample, collected by `finish`
        self._request = request
        self._metrics = metrics
        submitted = time.monotonic()
        self._times = [SampleTimes(prompt.arrived, submitted) for _ in self.text.samples]
        self._refused = False
        self._close_reason = ""  # of samples that were unfinished then
        self._trace = current_trace.get()
        if self._trace is not None:
            self._trace.add_prompt(prompt)

    @property
    def num_reasoning_tokens(self) -> int | None:
        """Return the number of tokens that the parsers have found to be reasoning; None if they do not look for it."""
        if self.prompt.format is None or not self.prompt.format.has_reasoning:
            return None
        samples = zip(self.text.samples, self.parsers, strict=True)
        return sum(
            sample.count_tokens(span.begin, span.end) for sample, parser in samples for span in parser.reasoning_spans
        )

    @cached_property
    def _engine_metrics(self) -> EngineMetrics:
        """Return the engine's metrics. They are made on first use, so that an engine that only refuses has none."""
        return self._metrics.engine(self._request.engine)

    async def wait_accepted(self) -> None:
        """Return as soon as the engine has queued the prompt. Raise as `updates` does if it refuses or fails."""
        try:
            await self._request.wait_accepted()
        except REFUSALS:
            self._refused = True
            raise

    async def updates(self) -> list[Update]:
        """Wait for rows. Return one update for each sample that has text to show or has ended.

        Raise `Overloaded`, `InvalidRequest` or `Unavailable` if the engine refuses, `EngineFailure` if it fails, and
        `InvalidRequest` if the request leaves an output no token.
        """
        with self._noting_refusals():
            rows = await self._request.rows()
        return self.read(rows)

    async def follow(self, take: Callable[[list[ProgressRow]], bool]) -> None:
        """Pass rows to `take` as they come, which has to `read` them, until it returns false. Raise as `updates`."""
        with self._noting_refusals():
            await self._request.follow(take)

    def read(self, rows: list[ProgressRow]) -> list[Update]:
        """Return what `updates` returns for rows that have come together."""
        now = time.monotonic()
        if self._request.recoveries:
            self._record_recoveries()
        samples, updates = self.text.samples, []
        for row in rows:
            sample = samples[row.sample]
            if sample.finish_reason is not None:  # a stop string came before this row
                continue
            text = self._apply(row, sample, now)
            if text or sample.finish_reason is not None:
                updates.append(Update(row.sample, text, sample.take_logprobs()))
        return updates if len(updates) < 2 else _merge_by_sample(updates)

    async def finish(self) -> None:
        """Run to the end, and collect the log-probabilities."""
        await self.follow(self._collect)

    def close(self, reason: str) -> None:
        """Record the unfinished samples, with `reason`.

        A refused prompt is in no metric of requests, nor is one that has ended before an engine got it.
        """
        self._close_reason = "refused" if self._refused else reason
        if self._trace is not None:
            for interruption in self._request.interruptions:
                self._trace.add_interruption(interruption, self.prompt.samples_before)
        if self._refused:
            return
        now = time.monotonic()
        for index, sample in enumerate(self.text.samples):
            if sample.finish_reason is None:
                self._record_end(index, reason, now)
        if not self._request.engine:
            return
        num_outputs = [len(sample.token_ids) for sample in self.text.samples]
        has_output = any(times.first_token for times in self._times)
        num_computed = len(self.prompt.tokens) - self.text.num_cached_tokens if has_output else None
        self._engine_metrics.record_prompt(self.prompt.sampling.max_tokens, num_outputs, num_computed)

    def log_arrival(self) -> None:
        """Log that the prompt is submitted to an engine."""
        sampling, n = self.prompt.sampling, len(self.text.samples)
        extra = of_request(self.prompt.request_id)
        length = len(self.prompt.tokens)
        logger.info("arrived: %d tokens of prompt, max_tokens=%d, n=%d", length, sampling.max_tokens, n, extra=extra)

    def log_end(self) -> None:
        """Log how the samples ended, after `close`."""
        samples = self.text.samples
        logger.info(
            "ended: %s, after %d tokens of prompt and %d of output, in %.3f s",
            ", ".join(sample.finish_reason or self._close_reason for sample in samples),
            len(self.prompt.tokens),
            self.text.num_output_tokens,
            time.monotonic() - self.prompt.arrived,
            extra=of_request(self.prompt.request_id),
        )

    @contextmanager
    def _noting_refusals(self) -> Iterator[None]:
        try:
            yield
        except REFUSALS:
            self._refused = True
            raise

    def _collect(self, rows: list[ProgressRow]) -> bool:
        for update in self.read(rows):
            self.logprobs[update.sample] += update.logprobs
        return not self.text.finished

    def _apply(self, row: ProgressRow, sample: SampleText, now: float) -> str:
        """Return the text that a row adds to its sample. Raise as `updates` does if the row says so."""
        times = self._times[row.sample]
        if row.scheduling is not None:
            times.scheduling = row.scheduling
        if row.finish_reason is not None:
            _check_end(row.finish_reason, row.detail)
        num_before = len(sample.token_ids)
        text, stopped = self.text.apply(row)
        self._engine_metrics.record_tokens(times, len(sample.token_ids) - num_before, now)
        if stopped:
            self._request.abort(row.sample)
        if sample.finish_reason is not None:
            self._record_end(row.sample, sample.finish_reason, now)
        return text

    def _record_end(self, index: int, reason: str, now: float) -> None:
        times, num_output = self._times[index], len(self.text.samples[index].token_ids)
        if self._request.engine:
            self._engine_metrics.record_sample(times, reason, len(self.prompt.tokens), num_output, now)
        if self._trace is not None:
            choice, engine = self.prompt.samples_before + index, self._request.engine
            self._trace.end_sample(choice, times, reason, engine=engine, num_output=num_output, now=now)

    def _record_recoveries(self) -> None:
        """Record how long the request did not go on after the losses of its engine."""
        for interruption in self._request.recoveries:
            if interruption.ended is not None:
                recovery = self._metrics.engine(interruption.engine).recovery
                recovery.observe(interruption.ended - interruption.began)
        self._request.recoveries.clear()


@asynccontextmanager
async def submit(gateway: Gateway, prompt: PreparedPrompt) -> AsyncIterator[Generation]:
    """Run `prompt` at an engine for the time of the block."""
    async with _submission(gateway.backend, prompt) as request:
        generation = Generation(prompt, request, gateway.model.tokenizer, gateway.metrics)
        if gateway.config.enable_log_requests:
            generation.log_arrival()
        try:
            yield generation
        except BaseException as error:
            generation.close(_reason(error))
            failure = _first(error)
            if isinstance(failure, (EngineFailure, Unavailable)):
                logger.error("a request failed: %s", failure, extra=of_request(prompt.request_id))
            raise
        else:
            generation.close("abort")
            hint_at_template(prompt, generation.text.samples, gateway.model.tokenizer)
        finally:
            if gateway.config.enable_log_requests:
                generation.log_end()


def _submission(
    backend: Backend, prompt: PreparedPrompt
) -> AbstractAsyncContextManager[EngineRequest] | AbstractAsyncContextManager[BeamRequest]:
    """Return a block for whose time `prompt` runs."""
    if prompt.beams is not None:
        return beam_request.search(backend, prompt, prompt.beams)
    return backend.submit(
        prompt.tokens,
        prompt.sampling,
        n=prompt.params.n,
        priority=prompt.priority,
        samples_before=prompt.samples_before,
        request_id=prompt.request_id,
        cache_salt=prompt.cache_salt,
        adapter=prompt.adapter,
    )


def _merge_by_sample(updates: Sequence[Update]) -> list[Update]:
    by_sample: dict[int, list[Update]] = {}
    for update in updates:
        by_sample.setdefault(update.sample, []).append(update)
    return [merge(several) for several in by_sample.values()]


def _check_end(reason: FinishReason, detail: str) -> None:
    """Raise an error if the engine did not end a sample because its output is complete."""
    if reason is FinishReason.ERROR and detail == NOTHING_LEFT:
        raise InvalidRequest(NOTHING_LEFT)
    if reason is FinishReason.ERROR:
        raise EngineFailure(detail or "the engine ended this request")
    if reason is FinishReason.ABORT:  # not by this gateway, which drops the rows of samples that it aborts
        raise Unavailable("the engine was shut down")


def _first(error: BaseException) -> BaseException:
    """Return an error that is no group: the first of a group."""
    return _first(error.exceptions[0]) if isinstance(error, BaseExceptionGroup) else error


def _reason(error: BaseException) -> str:
    """Return the finish reason of samples that `error` cut off.

    It is "error" if the engine or the gateway failed, and "abort" if the client left or another prompt was refused.
    """
    if isinstance(error, BaseExceptionGroup):
        return max(map(_reason, error.exceptions))  # "error" is greater than "abort"
    aborted = isinstance(error, (ConnectionError, *REFUSALS))
    return "error" if isinstance(error, Exception) and not aborted else "abort"
