"""`PendingRequest`: one prompt of an `LLM.generate` call, on its way to a `RequestOutput`."""

from collections.abc import Sequence
from math import fsum

from quire.outputs import CompletionOutput, RequestOutput, TokenDistribution, distribution
from shared.params import SamplingParams
from shared.protocol import FinishReason, ProgressRow, Sampling, Submit, pack_tokens
from shared.text.logprobs import LogprobEntry
from shared.text.request_text import RequestText
from shared.text.tokenizer import Tokenizer


class PendingRequest:
    """A prompt of `LLM.generate` and its output so far. `prompt` is its text, or None if it was passed as token ids."""

    def __init__(
        self,
        id: int,
        prompt: str | None,
        tokens: Sequence[int],
        params: SamplingParams,
        sampling: Sampling,
        tokenizer: Tokenizer,
    ) -> None:
        self.id = id
        self.prompt = prompt
        self.tokens = list(tokens)
        self.params = params
        self.sampling = sampling
        self.text = RequestText(tokenizer, self.tokens, params, sampling.stop_token_ids)
        self._logprobs: list[list[LogprobEntry]] = [[] for _ in self.text.samples]
        self._errors: dict[int, str] = {}  # by sample: why it could not go on

    @property
    def submit(self) -> Submit:
        """Return the request as a message to the engine."""
        return Submit(
            id=self.id,
            tokens=pack_tokens(self.tokens),
            prompt_len=len(self.tokens),
            sampling=self.sampling,
            n=self.params.n,
            request_id=str(self.id),
        )

    def apply(self, row: ProgressRow) -> bool:
        """Take in a row. Return whether a stop string has ended the sample, so that it has to be aborted."""
        if row.finish_reason is FinishReason.ERROR:
            self._errors[row.sample] = row.detail
        _, stopped = self.text.apply(row)
        self._logprobs[row.sample] += self.text.samples[row.sample].take_logprobs()
        return stopped

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
        )

    def _prompt_logprobs(self) -> list[TokenDistribution | None] | None:
        if self.params.prompt_logprobs is None:
            return None
        return [distribution(entry) for entry in self.text.prompt_logprobs()]

    def _completion(self, index: int) -> CompletionOutput:
        sample, entries = self.text.samples[index], self._logprobs[index]
        requested = self.params.num_logprobs is not None
        return CompletionOutput(
            index=index,
            text=sample.text,
            token_ids=sample.token_ids,
            cumulative_logprob=fsum(entry.logprob or 0.0 for entry in entries) if requested else None,
            logprobs=[distribution(entry) or {} for entry in entries] if requested else None,
            finish_reason=sample.finish_reason,
            stop_reason=sample.stop_reason,
            error=self._errors.get(index),
        )
