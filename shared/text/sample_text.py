"""`SampleText`: one sample from tokens to what its user sees: text, log-probabilities, and why it ended.

Feeds tokens to the detokenizer and its text to the stop matcher. Rules:
- The stop token itself is not shown, unless `include_stop_str_in_output` (and, for a special token, no skipping).
- A stop string counts if a token behind the first `min_tokens` completes it. It is looked for in the text that shows,
  so a special token's name is one only where special tokens are shown.
- There is one log-probability entry for each token taken, the stop token included. An entry is given out with the
  text behind its start, and all that are left at the end.
"""

from bisect import bisect_left
from collections.abc import Iterable, Sequence

from msgspec import Struct

from shared.params import SamplingParams
from shared.protocol import FinishReason, TokenLogprobs
from shared.text.detokenizer import Detokenizer
from shared.text.logprobs import LogprobEntry, make_entry
from shared.text.stop_strings import StopMatcher
from shared.text.tokenizer import Tokenizer


class _Pending(Struct, frozen=True, gc=False):
    """A token whose log-probabilities were not given out yet."""

    token: int
    found: TokenLogprobs
    offset: int
    at_start: bool  # whether it is the first token of its text


class SampleText:
    """`feed` it all tokens in order. It is over when `finish_reason` is set, which a stop string may do early.

    `stop_token_ids` are those that the engine stops at, end-of-sequence included. `echoed` is the number of characters
    of the prompt that are shown before the output, None if the prompt is not shown.
    """

    def __init__(
        self,
        tokenizer: Tokenizer,
        params: SamplingParams,
        prompt: Sequence[int],
        *,
        stop_token_ids: Iterable[int] = (),
        echoed: int | None = None,
    ) -> None:
        self.token_ids: list[int] = []
        self._starts: list[int] = []  # the offset at which each token's text begins
        self.finish_reason: str | None = None  # a value of `FinishReason`
        self.stop_reason: str | int | None = None  # a stop string, or a stop token id that the user asked for
        self._tokenizer = tokenizer
        self._params = params
        self._stops = params.stop_strings
        self._stop_ids = frozenset(stop_token_ids)
        self._detokenizer = Detokenizer(tokenizer, prompt, params.skip_special_tokens, echo=echoed is not None)
        self._matcher = StopMatcher(self._stops, params.include_stop_str_in_output)
        self._pieces: list[str] = []
        self._decoded = self._shown = echoed or 0  # lengths of text: known, and given out
        self._pending: list[_Pending] = []

    @property
    def text(self) -> str:
        """All that was given out."""
        return "".join(self._pieces)

    @property
    def shown_tokens(self) -> int:
        """Tokens of which text was given out, or all once the sample is over."""
        return len(self.token_ids) if self.finish_reason else bisect_left(self._starts, self._shown)

    def feed(
        self,
        tokens: Sequence[int],
        logprobs: Sequence[TokenLogprobs] | None = None,
        finish: FinishReason | None = None,
    ) -> str:
        """The text to show after `tokens`, the last ones if `finish`. Tokens behind a stop string are dropped."""
        shown = ""
        for at, token in enumerate(tokens):
            if self.finish_reason is not None:
                return shown
            self._starts.append(self._decoded)
            self.token_ids.append(token)
            if logprobs is not None:
                self._pending.append(self._place(token, logprobs[at]))
            shown += self._take(
                token, hidden=finish is FinishReason.STOP and at == len(tokens) - 1 and self._hides(token)
            )
        if finish is not None and self.finish_reason is None:
            shown += self._end(finish)
        return shown

    def take_logprobs(self) -> list[LogprobEntry]:
        """The entries that became due since the last call; none if none were fed."""
        due = len(self._pending)
        if self.finish_reason is None:
            due = next((at for at, pending in enumerate(self._pending) if pending.offset >= self._shown), due)
        taken, self._pending = self._pending[:due], self._pending[due:]
        return [
            make_entry(self._tokenizer, each.token, each.found, min(each.offset, self._shown), each.at_start)
            for each in taken
        ]

    def _hides(self, token: int) -> bool:
        return token in self._stop_ids and not self._params.include_stop_str_in_output

    def _take(self, token: int, hidden: bool) -> str:
        if hidden:
            return ""
        return self._push(self._detokenizer.push(token))

    def _place(self, token: int, found: TokenLogprobs) -> "_Pending":
        offset = self._decoded + self._detokenizer.breaks_character(token)
        return _Pending(token, found, offset, self._detokenizer.at_start)

    def _push(self, piece: str) -> str:
        self._decoded += len(piece)
        if self._stops:
            piece = self._matcher.push(piece, armed=len(self.token_ids) > self._params.min_tokens)
            if self._matcher.matched is not None:
                self._stop_at(self._matcher.matched)
        return self._show(piece)

    def _end(self, finish: FinishReason) -> str:
        shown = self._flush()
        if self.finish_reason is None:
            self.finish_reason = finish.value
            last = self.token_ids[-1] if self.token_ids else None
            if finish is FinishReason.STOP and last in (self._params.stop_token_ids or ()):
                self.stop_reason = last
        return shown

    def _flush(self) -> str:
        shown = self._push(self._detokenizer.flush())
        return shown if self.finish_reason is not None else shown + self._show(self._matcher.flush())

    def _stop_at(self, stop: str) -> None:
        self.finish_reason, self.stop_reason = FinishReason.STOP.value, stop

    def _show(self, piece: str) -> str:
        if piece:
            self._shown += len(piece)
            self._pieces.append(piece)
        return piece
