"""`SampleText`: one sample, from its tokens to the text, log-probabilities and finish reason that a user sees.

It feeds the tokens to the detokenizer, and the text to the stop matcher. Its rules:
- Without `detokenize` there is no text, only tokens, their log-probabilities and the finish reason.
- The stop token itself is shown only with `include_stop_str_in_output`, and a special one only if none are skipped.
- A repetition that the user wants to end the sample does so with its last token, unless that ends the sample anyway.
- A stop string counts if a token after the first `min_tokens` completes it. The matcher searches the text that is
  shown. A special token that is not shown is a stop string as a whole, by its name, and no part of its name is.
- Each token has one log-probability entry, the stop token included. An entry is due as soon as text after the token's
  start is shown, or at the end of the sample.
"""

from bisect import bisect_left
from collections.abc import Iterable, Sequence

from msgspec import Struct

from shared.params import SamplingParams
from shared.protocol import FinishReason, TokenLogprobs
from shared.text.detokenizer import Detokenizer
from shared.text.logprobs import LogprobEntry, make_entry
from shared.text.repetition import FINISH_REASON, STOP_REASON, RepetitionDetector
from shared.text.stop_strings import StopMatcher
from shared.text.tokenizer import Tokenizer


class _PendingLogprobs(Struct, frozen=True, gc=False):
    """A token's log-probabilities that are not due yet."""

    token: int
    logprobs: TokenLogprobs
    offset: int  # characters of text before the token
    at_start: bool  # the token is the first of its text


class SampleText:
    """The text of one sample. `feed` takes all tokens in order, until `finish_reason` is set, early by a stop string.

    `stop_token_ids` are those at which the engine stops, end-of-sequence included. `echo_length` is the number of
    characters of the prompt that are shown before the output, or None if the prompt is not shown. `shown_special` are
    special tokens that are shown even if those are skipped, since a parser reads them.
    """

    def __init__(
        self,
        tokenizer: Tokenizer,
        params: SamplingParams,
        prompt: Sequence[int],
        *,
        stop_token_ids: Iterable[int] = (),
        echo_length: int | None = None,
        shown_special: frozenset[int] = frozenset(),
    ) -> None:
        self.token_ids: list[int] = []
        self._offsets: list[int] = []  # characters before each token
        self.finish_reason: str | None = None  # a value of `FinishReason`, or "repetition"
        self.stop_reason: str | int | None = None  # a stop string, or an id of the user's `stop_token_ids`
        self._decodes = params.detokenize
        self._spelling = tokenizer if params.detokenize else None  # of the tokens in log-probabilities
        self._params = params
        self._stops = params.stop_strings
        self._stop_ids = frozenset(stop_token_ids)
        prompt = prompt if params.detokenize else ()
        self._detokenizer = Detokenizer(
            tokenizer,
            prompt,
            params.skip_special_tokens,
            echo=echo_length is not None,
            shown_special=shown_special,
            spaces_between_special_tokens=params.spaces_between_special_tokens,
        )
        detection = params.repetition_detection
        self._repetition = RepetitionDetector(detection) if detection and detection.max_pattern_size else None
        self._matcher = StopMatcher(self._stops, params.include_stop_str_in_output)
        self._hidden_stops = {
            id: stop
            for stop in self._stops
            if (id := tokenizer.token_id(stop)) is not None and self._detokenizer.hides(id)
        }  # special tokens that are not shown and whose names are stop strings
        self._pieces: list[str] = []
        self._num_decoded = self._num_shown = echo_length or 0  # characters
        self._pending: list[_PendingLogprobs] = []

    @property
    def text(self) -> str:
        """Return the text shown so far."""
        return "".join(self._pieces)

    @property
    def num_shown_tokens(self) -> int:
        """Return the number of tokens whose text is shown, at least in part. Once the sample has ended, all count."""
        return len(self.token_ids) if self.finish_reason else bisect_left(self._offsets, self._num_shown)

    def count_tokens(self, begin: int, end: int | None) -> int:
        """Return the number of tokens that begin at character `begin` or later, and before `end` if it is not None."""
        num_before_end = len(self._offsets) if end is None else bisect_left(self._offsets, end)
        return num_before_end - bisect_left(self._offsets, begin)

    def feed(
        self,
        tokens: Sequence[int],
        logprobs: Sequence[TokenLogprobs] | None = None,
        finish_reason: FinishReason | None = None,
    ) -> str:
        """Add `tokens`, which are the last ones if there is a `finish_reason`. Return the text to show.

        Tokens after a stop string or a repetition are dropped.
        """
        shown = ""
        last = -1 if finish_reason is None else len(tokens) - 1  # the index of the sequence's last token
        for index, token in enumerate(tokens):
            if self.finish_reason is not None:
                break
            self._offsets.append(self._num_decoded)
            self.token_ids.append(token)
            if logprobs is not None:
                self._pending.append(self._pending_logprobs(token, logprobs[index]))
            stops = index == last and finish_reason is FinishReason.STOP
            if self._decodes and not (stops and self._hides(token)):
                shown += self._push(self._detokenizer.push(token))
            if token in self._hidden_stops and self._may_match and not stops:
                shown += self._finish(FinishReason.STOP.value, self._hidden_stops[token])
            if self._repetition is not None and self._repeats(token) and index != last:
                shown += self._finish(FINISH_REASON, STOP_REASON)
        if finish_reason is not None and self.finish_reason is None:
            shown += self._finish(finish_reason.value, self._stop_token(finish_reason))
        if shown:
            self._num_shown += len(shown)
            self._pieces.append(shown)
        return shown

    def take_logprobs(self) -> list[LogprobEntry]:
        """Return the entries that have become due since the last call."""
        if not self._pending:
            return []
        num_due = len(self._pending)
        if self.finish_reason is None:
            later = (index for index, entry in enumerate(self._pending) if entry.offset >= self._num_shown)
            num_due = next(later, num_due)
        due, self._pending = self._pending[:num_due], self._pending[num_due:]
        ranked = not self._params.logprob_token_ids
        return [
            make_entry(
                self._spelling,
                entry.token,
                entry.logprobs,
                min(entry.offset, self._num_shown),
                entry.at_start,
                ranked=ranked,
            )
            for entry in due
        ]

    @property
    def _may_match(self) -> bool:
        """Return whether a stop string that the last token completes counts."""
        return len(self.token_ids) > self._params.min_tokens

    def _hides(self, token: int) -> bool:
        return token in self._stop_ids and not self._params.include_stop_str_in_output

    def _pending_logprobs(self, token: int, logprobs: TokenLogprobs) -> _PendingLogprobs:
        offset = self._num_decoded + self._detokenizer.breaks_character(token)
        return _PendingLogprobs(token, logprobs, offset, self._detokenizer.at_start)

    def _push(self, piece: str) -> str:
        self._num_decoded += len(piece)
        if self._stops:
            piece = self._matcher.push(piece, can_match=self._may_match)
            if self._matcher.matched is not None:
                self.finish_reason, self.stop_reason = FinishReason.STOP.value, self._matcher.matched
        return piece

    def _repeats(self, token: int) -> bool:
        """Return whether `token` completes a repetition that ends the sample."""
        assert self._repetition is not None
        return (
            self._repetition.push(token)
            and self.finish_reason is None
            and len(self.token_ids) >= self._params.min_tokens
        )

    def _stop_token(self, reason: FinishReason) -> int | None:
        """Return the id of the user's `stop_token_ids` that ended the sample, if one did."""
        last = self.token_ids[-1] if self.token_ids else None
        return last if reason is FinishReason.STOP and last in (self._params.stop_token_ids or ()) else None

    def _finish(self, reason: str, stop_reason: str | int | None) -> str:
        """End the sample. Return the text that was held back."""
        shown = self._flush()
        if self.finish_reason is None:  # the rest of the text may have completed a stop string
            self.finish_reason, self.stop_reason = reason, stop_reason
        return shown

    def _flush(self) -> str:
        shown = self._push(self._detokenizer.flush())
        return shown if self.finish_reason is not None else shown + self._matcher.flush()
