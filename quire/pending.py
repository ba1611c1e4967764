"""One request of an `LLM.generate` call, from its prompt to its `RequestOutput`."""

from collections.abc import Sequence
from math import fsum

from quire.outputs import CompletionOutput, RequestOutput, TokenDistribution, distribution
from shared.params import SamplingParams
from shared.protocol import ProgressRow, Sampling, Submit, TokenLogprobs, pack_tokens
from shared.text.logprobs import LogprobEntry, prompt_entries
from shared.text.sample_text import SampleText
from shared.text.tokenizer import Tokenizer


class Pending:
    """Takes a request's progress and tells which samples a stop string has ended."""

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
        self.tokenizer = tokenizer
        self.samples = [
            SampleText(tokenizer, params, tokens, stop_token_ids=sampling.stop_token_ids) for _ in range(params.n)
        ]
        self.logprobs: list[list[LogprobEntry]] = [[] for _ in self.samples]
        self.prompt_logprobs: list[TokenLogprobs] = []
        self.cached_tokens = 0

    @property
    def finished(self) -> bool:
        return all(sample.finish_reason is not None for sample in self.samples)

    @property
    def submit(self) -> Submit:
        """The request as the scheduler takes it."""
        return Submit(
            id=self.id,
            tokens=pack_tokens(self.tokens),
            prompt_len=len(self.tokens),
            sampling=self.sampling,
            n=self.params.n,
        )

    def apply(self, row: ProgressRow) -> bool:
        """Take in the news of one sample; true if its text has ended while the engine would go on."""
        sample = self.samples[row.sample]
        if sample.finish_reason is not None:
            return False
        self.cached_tokens = max(self.cached_tokens, row.cached_tokens)
        if row.sample == 0:  # the samples share the prompt
            self.prompt_logprobs += row.prompt_logprobs or []
        sample.feed(row.tokens, row.logprobs, row.finish_reason)
        self.logprobs[row.sample] += sample.take_logprobs()
        return sample.finish_reason is not None and row.finish_reason is None

    def output(self) -> RequestOutput:
        """The result so far."""
        return RequestOutput(
            request_id=str(self.id),
            prompt=self.prompt,
            prompt_token_ids=self.tokens,
            prompt_logprobs=self._prompt_logprobs(),
            outputs=[self._completion(index) for index in range(len(self.samples))],
            finished=self.finished,
            num_cached_tokens=self.cached_tokens,
        )

    def _prompt_logprobs(self) -> list[TokenDistribution | None] | None:
        if self.params.prompt_logprobs is None:
            return None
        entries = prompt_entries(self.tokenizer, self.tokens, self.prompt_logprobs)
        return [distribution(entry) for entry in entries]

    def _completion(self, index: int) -> CompletionOutput:
        sample, entries = self.samples[index], self.logprobs[index]
        wanted = self.params.num_logprobs is not None
        return CompletionOutput(
            index=index,
            text=sample.text,
            token_ids=sample.token_ids,
            cumulative_logprob=fsum(entry.logprob or 0.0 for entry in entries) if wanted else None,
            logprobs=[distribution(entry) or {} for entry in entries] if wanted else None,
            finish_reason=sample.finish_reason,
            stop_reason=sample.stop_reason,
        )
