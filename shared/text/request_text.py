"""`RequestText`: one prompt's samples, from the engine's rows to text, log-probabilities and finish reasons.

Both front doors keep one for each prompt that they submit, and apply each row of it in order. A stop string ends a
sample here, before the engine knows; the caller then aborts the sample at the engine.
"""

from collections.abc import Iterable, Sequence

from shared.params import SamplingParams
from shared.protocol import ProgressRow, TokenLogprobs
from shared.text.logprobs import LogprobEntry, prompt_entries
from shared.text.sample_text import SampleText
from shared.text.tokenizer import Tokenizer


class RequestText:
    """The samples of `prompt`, and what the engine tells of the prompt itself.

    `stop_token_ids` and `echo_length` are those of `SampleText`. `offsets` says where each token begins in the
    prompt's text; without it, `prompt_logprobs` counts in the text that the tokens spell.
    """

    def __init__(
        self,
        tokenizer: Tokenizer,
        prompt: Sequence[int],
        params: SamplingParams,
        stop_token_ids: Iterable[int],
        *,
        echo_length: int | None = None,
        offsets: Sequence[int] | None = None,
    ) -> None:
        self.samples = [
            SampleText(tokenizer, params, prompt, stop_token_ids=stop_token_ids, echo_length=echo_length)
            for _ in range(params.n)
        ]
        self.num_cached_tokens = 0  # of the prompt, found in the prefix cache
        self._tokenizer = tokenizer
        self._prompt = prompt
        self._offsets = offsets
        self._prompt_logprobs: list[TokenLogprobs] = []
        self._prompt_entries: list[LogprobEntry] | None = None

    @property
    def finished(self) -> bool:
        """Return whether each sample has a finish reason."""
        for sample in self.samples:  # noqa: SIM110  (this runs for each row, and a generator costs three times as much)
            if sample.finish_reason is None:
                return False
        return True

    @property
    def num_output_tokens(self) -> int:
        """Return the number of output tokens so far, over all samples."""
        return sum(len(sample.token_ids) for sample in self.samples)

    def apply(self, row: ProgressRow) -> tuple[str, bool]:
        """Take in a row. Return the text to show, and whether a stop string has ended the sample before the engine did.

        A row of a sample that has ended is dropped: the engine sent it before it knew of the stop string.
        """
        sample = self.samples[row.sample]
        if sample.finish_reason is not None:
            return "", False
        if row.cached_tokens > self.num_cached_tokens:
            self.num_cached_tokens = row.cached_tokens
        if row.sample == 0 and row.prompt_logprobs:  # the samples share the prompt
            self._prompt_logprobs += row.prompt_logprobs
        text = sample.feed(row.tokens, row.logprobs, row.finish_reason)
        return text, sample.finish_reason is not None and row.finish_reason is None

    def prompt_logprobs(self) -> list[LogprobEntry]:
        """Return one entry a token of the prompt, if they were requested. They are complete with the first output.

        They are made once: a prompt of thousands of tokens has a hundred thousand alternatives.
        """
        if self._prompt_entries is None:
            self._prompt_entries = prompt_entries(self._tokenizer, self._prompt, self._prompt_logprobs, self._offsets)
        return self._prompt_entries
