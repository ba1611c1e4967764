"""`Generation`: one prompt in flight, from the engine's rows to text.

`submit` is the region in which it runs; leaving it, for whatever reason, ends what is unfinished at the engine and
enters each sample in the metrics once.
"""

import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from msgspec import Struct

from services.gateway.backend import Attempt
from services.gateway.metrics import Metrics, Timing
from services.gateway.serving import Gateway, Job
from shared.errors import EngineFailure, InvalidRequest, Overloaded, Unavailable
from shared.protocol import FinishReason, ProgressRow, TokenLogprobs
from shared.text.logprobs import LogprobEntry, prompt_entries
from shared.text.sample_text import SampleText
from shared.text.tokenizer import Tokenizer

REFUSALS = (Overloaded, InvalidRequest, Unavailable)


class Update(Struct, frozen=True, gc=False):
    """News of one sample that its user is to see. With the last one the sample has its `finish_reason`."""

    sample: int
    text: str
    entries: list[LogprobEntry]


class Generation:
    """The samples of one prompt. Take `updates` until `done`."""

    def __init__(self, job: Job, attempt: Attempt, tokenizer: Tokenizer, metrics: Metrics) -> None:
        self.job = job
        self.samples = [
            SampleText(
                tokenizer,
                job.params,
                job.tokens,
                stop_token_ids=job.sampling.stop_token_ids,
                echoed=None if job.echo is None else len(job.echo),
            )
            for _ in range(job.params.n)
        ]
        self.entries: list[list[LogprobEntry]] = [[] for _ in self.samples]  # what `finish` took of each sample
        self.cached_tokens = 0
        self._attempt = attempt
        self._tokenizer = tokenizer
        self._metrics = metrics
        submitted = time.monotonic()
        self._timings = [Timing(job.arrived, submitted) for _ in self.samples]
        self._unfinished = job.params.n
        self._refused = False
        self._prompt_logprobs: list[TokenLogprobs] = []
        self._prompt_entries: list[LogprobEntry] | None = None

    @property
    def done(self) -> bool:
        return not self._unfinished

    @property
    def output_tokens(self) -> int:
        """Of all samples, so far."""
        return sum(len(sample.token_ids) for sample in self.samples)

    def prompt_entries(self) -> list[LogprobEntry]:
        """Log-probabilities of the prompt, if the job asked for them; to be taken from the first update on.

        They are complete then, and made once: a prompt of thousands of tokens has a hundred thousand alternatives.
        """
        if self._prompt_entries is None:
            job = self.job
            self._prompt_entries = prompt_entries(self._tokenizer, job.tokens, self._prompt_logprobs, job.offsets)
        return self._prompt_entries

    async def accepted(self) -> None:
        """Return as soon as the engine has taken the prompt into its queue. Raises as `updates` does if it has not."""
        try:
            await self._attempt.accepted()
        except REFUSALS:
            self._refused = True
            raise

    async def updates(self) -> list[Update]:
        """Waits for rows. One update a sample that has text to show or has ended, whatever number of rows came.

        Raises `Overloaded`, `InvalidRequest` or `Unavailable` if the engine refuses, `EngineFailure` if it fails.
        """
        try:
            rows = await self._attempt.rows()
        except REFUSALS:
            self._refused = True
            raise
        now = time.monotonic()
        shown: dict[int, str] = {}
        for row in rows:
            if self.samples[row.sample].finish_reason is None:  # else these tokens are behind a stop string
                shown[row.sample] = shown.get(row.sample, "") + self._take(row, now)
        return [
            Update(at, text, self.samples[at].take_logprobs())
            for at, text in shown.items()
            if text or self.samples[at].finish_reason is not None
        ]

    async def finish(self) -> None:
        """Takes all updates to the end, and keeps them."""
        while not self.done:
            for update in await self.updates():
                self.entries[update.sample] += update.entries

    def close(self, reason: str) -> None:
        """Enter the samples that have not ended in the metrics; what was refused never began."""
        if self._refused:
            return
        now = time.monotonic()
        for at, sample in enumerate(self.samples):
            if sample.finish_reason is None:
                self._ended(at, reason, now)
        outputs = [len(sample.token_ids) for sample in self.samples]
        figures = self._metrics.engine(self._attempt.engine)
        computed = len(self.job.tokens) - self.cached_tokens if any(timing.first for timing in self._timings) else None
        figures.prompt_ended(self.job.sampling.max_tokens, outputs, computed)

    def _take(self, row: ProgressRow, now: float) -> str:
        if row.scheduling is not None:
            self._timings[row.sample].scheduling = row.scheduling
        if row.finish_reason is FinishReason.ERROR:
            raise EngineFailure(row.detail or "the engine ended this request")
        if row.finish_reason is FinishReason.ABORT:  # and not by us: of those that we aborted no rows are taken
            raise Unavailable("the engine was shut down")
        if row.sample == 0 and row.prompt_logprobs:
            self._prompt_logprobs += row.prompt_logprobs
        self.cached_tokens = max(self.cached_tokens, row.cached_tokens)
        sample = self.samples[row.sample]
        before = len(sample.token_ids)
        text = sample.feed(row.tokens, row.logprobs, row.finish_reason)
        figures = self._metrics.engine(self._attempt.engine)
        figures.tokens(self._timings[row.sample], len(sample.token_ids) - before, now)
        if sample.finish_reason is not None:
            if row.finish_reason is None:  # a stop string, of which the engine knows nothing
                self._attempt.abort(row.sample)
            self._ended(row.sample, sample.finish_reason, now)
        return text

    def _ended(self, at: int, reason: str, now: float) -> None:
        self._unfinished -= 1
        figures = self._metrics.engine(self._attempt.engine)
        output = len(self.samples[at].token_ids)
        figures.sample_ended(self._timings[at], reason, len(self.job.tokens), output, now)


@asynccontextmanager
async def submit(gateway: Gateway, job: Job) -> AsyncIterator[Generation]:
    """Runs `job` at an engine for as long as the region is not left."""
    submitted = gateway.backend.submit(
        job.tokens, job.sampling, n=job.params.n, priority=job.priority, samples_before=job.samples_before
    )
    async with submitted as attempt:
        generation = Generation(job, attempt, gateway.model.tokenizer, gateway.metrics)
        try:
            yield generation
        except BaseException as error:
            generation.close(_reason(error))
            raise
        generation.close("abort")


def _reason(error: BaseException) -> str:
    """Why samples ended that their engine did not end: it failed, or their client (or a sibling's refusal) did it."""
    if isinstance(error, BaseExceptionGroup):
        return max(_reason(one) for one in error.exceptions)  # "error" before "abort"
    left = isinstance(error, (ConnectionError, *REFUSALS))
    return "error" if isinstance(error, Exception) and not left else "abort"
