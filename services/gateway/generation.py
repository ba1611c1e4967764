"""`Generation`: one prompt at an engine. It turns the engine's rows into text, metrics and errors.

A generation runs for the time of a `submit` block. However the block ends, the unfinished samples are aborted at the
engine, and each sample is recorded in the metrics once.
"""

import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from functools import cached_property

from msgspec import Struct

from services.gateway.backend import EngineRequest
from services.gateway.gateway import Gateway
from services.gateway.metrics import EngineMetrics, Metrics, SampleTimes
from services.gateway.prompt import PreparedPrompt
from shared.errors import EngineFailure, InvalidRequest, Overloaded, Unavailable
from shared.protocol import FinishReason, ProgressRow
from shared.text.logprobs import LogprobEntry
from shared.text.message_parser import MessageParser
from shared.text.request_text import RequestText
from shared.text.tokenizer import Tokenizer

REFUSALS = (Overloaded, InvalidRequest, Unavailable)


class Update(Struct, frozen=True, gc=False):
    """New text of one sample. Once the last update is made, the sample has its `finish_reason`."""

    sample: int
    text: str
    logprobs: list[LogprobEntry]


class Generation:
    """The samples of one prompt at an engine. Await `updates` until `text.finished`."""

    def __init__(self, prompt: PreparedPrompt, request: EngineRequest, tokenizer: Tokenizer, metrics: Metrics) -> None:
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

        Raise `Overloaded`, `InvalidRequest` or `Unavailable` if the engine refuses, `EngineFailure` if it fails.
        """
        try:
            rows = await self._request.rows()
        except REFUSALS:
            self._refused = True
            raise
        now = time.monotonic()
        samples = self.text.samples
        texts: dict[int, str] = {}
        for row in rows:
            if samples[row.sample].finish_reason is None:  # otherwise a stop string came before this row
                texts[row.sample] = texts.get(row.sample, "") + self._apply(row, now)
        return [
            Update(index, text, samples[index].take_logprobs())
            for index, text in texts.items()
            if text or samples[index].finish_reason is not None
        ]

    async def finish(self) -> None:
        """Run to the end, and collect the log-probabilities."""
        while not self.text.finished:
            for update in await self.updates():
                self.logprobs[update.sample] += update.logprobs

    def close(self, reason: str) -> None:
        """Record the unfinished samples in the metrics, with `reason`. A refused prompt is not recorded."""
        if self._refused:
            return
        now = time.monotonic()
        for index, sample in enumerate(self.text.samples):
            if sample.finish_reason is None:
                self._record_end(index, reason, now)
        num_outputs = [len(sample.token_ids) for sample in self.text.samples]
        has_output = any(times.first_token for times in self._times)
        num_computed = len(self.prompt.tokens) - self.text.num_cached_tokens if has_output else None
        self._engine_metrics.record_prompt(self.prompt.sampling.max_tokens, num_outputs, num_computed)

    def _apply(self, row: ProgressRow, now: float) -> str:
        """Return the text that a row adds to its sample. Raise `EngineFailure` or `Unavailable` if the row says so."""
        sample, times = self.text.samples[row.sample], self._times[row.sample]
        if row.scheduling is not None:
            times.scheduling = row.scheduling
        if row.finish_reason is FinishReason.ERROR:
            raise EngineFailure(row.detail or "the engine ended this request")
        if (
            row.finish_reason is FinishReason.ABORT
        ):  # not by this gateway, which drops the rows of samples that it aborts
            raise Unavailable("the engine was shut down")
        num_before = len(sample.token_ids)
        text, stopped = self.text.apply(row)
        self._engine_metrics.record_tokens(times, len(sample.token_ids) - num_before, now)
        if stopped:
            self._request.abort(row.sample)
        if sample.finish_reason is not None:
            self._record_end(row.sample, sample.finish_reason, now)
        return text

    def _record_end(self, index: int, reason: str, now: float) -> None:
        num_output = len(self.text.samples[index].token_ids)
        self._engine_metrics.record_sample(self._times[index], reason, len(self.prompt.tokens), num_output, now)


@asynccontextmanager
async def submit(gateway: Gateway, prompt: PreparedPrompt) -> AsyncIterator[Generation]:
    """Run `prompt` at an engine for the time of the block."""
    submission = gateway.backend.submit(
        prompt.tokens,
        prompt.sampling,
        n=prompt.params.n,
        priority=prompt.priority,
        samples_before=prompt.samples_before,
    )
    async with submission as request:
        generation = Generation(prompt, request, gateway.model.tokenizer, gateway.metrics)
        try:
            yield generation
        except BaseException as error:
            generation.close(_reason(error))
            raise
        generation.close("abort")


def _reason(error: BaseException) -> str:
    """Return the finish reason of samples that `error` cut off.

    It is "error" if the engine or the gateway failed, and "abort" if the client left or another prompt was refused.
    """
    if isinstance(error, BaseExceptionGroup):
        return max(map(_reason, error.exceptions))  # "error" is greater than "abort"
    aborted = isinstance(error, (ConnectionError, *REFUSALS))
    return "error" if isinstance(error, Exception) and not aborted else "abort"
