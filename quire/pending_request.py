"""`PendingRequest`: one prompt of an `LLM` call, on its way to a `RequestOutput`."""

import time
from collections.abc import Sequence
from math import fsum

from quire.flat_logprobs import FlatLogprobs
from quire.lora_request import LoRARequest
from quire.outputs import CompletionOutput, RequestOutput, RequestStateStats, TokenDistribution, distribution
from shared.params import SamplingParams
from shared.protocol import FinishReason, ProgressRow, Sampling, Submit, pack_tokens
from shared.text.logprobs import LogprobEntry
from shared.text.raw_prompts import ended_at_once
from shared.text.request_text import RequestText
from shared.text.tokenizer import Tokenizer


class PendingRequest:
    """A prompt and its output so far. `prompt` is its text, or None if it was passed as token ids.

    `lacks_template` says that the model has a chat template, and that this prompt was not made by it.
    Times are in seconds of the monotonic clock.
    """

    def __init__(
        self,
        id: int,
        prompt: str | None,
        tokens: Sequence[int],
        params: SamplingParams,
        sampling: Sampling,
        tokenizer: Tokenizer,
        *,
        priority: int = 0,
        cache_salt: str = "",
        adapter: LoRARequest | None = None,
        lacks_template: bool = False,
    ) -> None:
        self.id = id
        self.adapter = adapter
        self.cache_salt = cache_salt
        self.prompt = prompt
        self.tokens = list(tokens)
        self.params = params
        self.sampling = sampling
        self.priority = priority
        self.text = RequestText(tokenizer, self.tokens, params, sampling.stop_token_ids)
        self._tokenizer, self._lacks_template = tokenizer, lacks_template
        self._logprobs: list[list[TokenDistribution] | FlatLogprobs] = [
            FlatLogprobs() if params.flat_logprobs else [] for _ in self.text.samples
        ]
        self._times = _Times()
        self._errors: dict[int, str] = {}  # by sample: why it could not go on

    def submit(self, now: float) -> Submit:
        """Return the request as a message to the engine, which gets it now."""
        self._times.queued = now
        return Submit(
            id=self.id,
            tokens=pack_tokens(self.tokens),
            prompt_len=len(self.tokens),
            sampling=self.sampling,
            n=self.params.n,
            priority=self.priority,
            request_id=str(self.id),
            cache_salt=self.cache_salt,
            adapter="" if self.adapter is None else self.adapter.lora_name,
        )

    def apply(self, row: ProgressRow, now: float) -> bool:
        """Take in a row. Return whether the text has ended the sample, so that it has to be aborted."""
        self._times.note(row, now)
        if row.finish_reason is FinishReason.ERROR:
            self._errors[row.sample] = row.detail
        _, stopped = self.text.apply(row)
        for entry in self.text.samples[row.sample].take_logprobs():
            self._logprobs[row.sample].append(self._distribution(entry) or {})
        return stopped

    @property
    def seems_to_lack_template(self) -> bool:
        """Return whether the request has ended as those of chat models do whose prompt lacks the chat template."""
        return self._lacks_template and ended_at_once(self.tokens, self.text.samples, self.sampling, self._tokenizer)

    def output(self) -> RequestOutput:
        """Return the result so far."""
        return RequestOutput(
            request_id=str(self.id),
            prompt=self.prompt,
            prompt_token_ids=self.tokens,
            prompt_logprobs=self._prompt_logprobs(),
            outputs=[self._completion(index) for index in range(len(self.text.samples))],
            finished=self.text.finished,
            num_cached_tokens=self.text.num_cached_tokens,
            metrics=self._times.stats(self.text.num_output_tokens),
            lora_request=self.adapter,
        )

    def _prompt_logprobs(self) -> Sequence[TokenDistribution | None] | None:
        if self.params.prompt_logprobs is None:
            return None
        distributions = [self._distribution(entry) for entry in self.text.prompt_logprobs()]
        return FlatLogprobs(distributions) if self.params.flat_logprobs else distributions

    def _completion(self, index: int) -> CompletionOutput:
        sample, logprobs = self.text.samples[index], self._logprobs[index]
        own = (found[token].logprob for token, found in zip(sample.token_ids, logprobs, strict=False))
        requested = self.params.num_logprobs is not None
        return CompletionOutput(
            index=index,
            text=sample.text,
            token_ids=sample.token_ids,
            cumulative_logprob=fsum(own) if requested else None,
            logprobs=logprobs if requested else None,
            finish_reason=sample.finish_reason,
            stop_reason=sample.stop_reason,
            error=self._errors.get(index),
            lora_request=self.adapter,
        )

    def _distribution(self, entry: LogprobEntry) -> TokenDistribution | None:
        return distribution(entry, with_text=self.params.detokenize)


class _Times:
    """When things happened to a request: the earliest of its samples counts, and the latest token."""

    def __init__(self) -> None:
        self.arrival_time = time.time()
        self.arrived = time.monotonic()
        self.queued = self.scheduled = self.first_token = self.last_token = 0.0

    def note(self, row: ProgressRow, now: float) -> None:
        """Note a row that has come now."""
        if row.scheduling is not None and not self.scheduled:
            self.scheduled = self.queued + row.scheduling.queued_seconds
        if row.tokens:
            self.first_token = self.first_token or now
            self.last_token = now

    def stats(self, num_tokens: int) -> RequestStateStats:
        """Return the times in the form of a result."""
        return RequestStateStats(
            num_generation_tokens=num_tokens,
            arrival_time=self.arrival_time,
            queued_ts=self.queued,
            scheduled_ts=self.scheduled,
            first_token_ts=self.first_token,
            last_token_ts=self.last_token,
            first_token_latency=self.first_token - self.arrived if self.first_token else 0.0,
        )
