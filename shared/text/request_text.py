"""`RequestText`: one prompt's samples, from the engine's rows to text, log-probabilities and finish reasons.

The gateway and `quire.LLM` have one for each prompt that they submit, and apply its rows in order. A stop string ends a
sample here first, and the caller then aborts the sample at the engine.
"""

from collections.abc import Iterable, Sequence

from shared.params import SamplingParams
from shared.protocol import ProgressRow, TokenLogprobs
from shared.text.logprobs import LogprobEntry, prompt_entries
from shared.text.sample_text import SampleText
from shared.text.tokenizer import Tokenizer


class RequestText:
    """The samples of `prompt`, with the number of cached tokens and the log-probabilities of the prompt.

    `stop_token_ids`, `echo_length` and `shown_special` are those of `SampleText`. `offsets` are the characters of the
    prompt's text before each token; without them, `prompt_logprobs` has the offsets in the decoded text.
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
        shown_special: frozenset[int] = frozenset(),
    ) -> None:
        self.samples = [
            SampleText(
                tokenizer,
                params,
                prompt,
                stop_token_ids=stop_token_ids,
                echo_length=echo_length,
                shown_special=shown_special,
            )
            for _ in range(params.n)
        ]
        self.num_cached_tokens = 0  # of the prompt, found in the prefix cache
        self.finished = False  # whether each sample has a finish reason
        self._num_unfinished = params.n
        self._spelling = tokenizer if params.detokenize else None
        self._prompt = prompt
        self._offsets = offsets
        self._prompt_logprobs: list[TokenLogprobs] = []
        self._prompt_entries: list[LogprobEntry] | None = None

    @property
    def num_output_tokens(self) -> int:
        """Return the number of output tokens so far, over all samples."""
        return sum(len(sample.token_ids) for sample in self.samples)

    def apply(self, row: ProgressRow) -> tuple[str, bool]:
        """Apply a row. Return the text to show, and whether a stop string has ended the sample.

        In that case the engine still runs the sample. Rows of a sample that has ended are dropped.
        """
        sample = self.samples[row.sample]
        if sample.finish_reason is not None:
            return "", False
        if row.cached_tokens > self.num_cached_tokens:
            self.num_cached_tokens = row.cached_tokens
        if row.sample == 0 and row.prompt_logprobs:  # the samples share the prompt
            self._prompt_logprobs += row.prompt_logprobs
        text = sample.feed(row.tokens, row.logprobs, row.finish_reason)
        if sample.finish_reason is None:
            return text, False
        self._num_unfinished -= 1
        self.finished = not self._num_unfinished
        return text, row.finish_reason is None

    def prompt_logprobs(self) -> list[LogprobEntry]:
        """Return an entry for each token of the prompt, if they were requested. All are there with the first output.

        They are made once, since a prompt of thousands of tokens has a hundred thousand alternatives.
        """
        if self._prompt_entries is None:
            self._prompt_entries = prompt_entries(self._spelling, self._prompt, self._prompt_logprobs, self._offsets)
        return self._prompt_entries
