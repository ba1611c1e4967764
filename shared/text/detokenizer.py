"""`Detokenizer`: one sequence's tokens to text, as they come, never half a character.

The library's `DecodeStream` does the work. It is seeded with the last tokens of the prompt, because how a token reads
may depend on the one before it; nothing of the prompt is given out again. A prompt that ends inside a character is
seeded up to that character, whose bytes then wait for the rest.
"""

from collections.abc import Sequence

from tokenizers.decoders import DecodeStream

from shared.text.tokenizer import Tokenizer

REPLACEMENT = "\ufffd"  # what the library shows for bytes that are no character, or not yet
SEED = 16  # tokens of the prompt; the decoder looks back one or two
PATIENCE = 16  # tokens that may wait for a character to end; it has four bytes at most, so these are no text
CHARACTER = 4  # bytes of the longest


class Detokenizer:
    """`push` each token, then `flush`; the pieces joined are the text of the tokens behind the prompt."""

    def __init__(self, tokenizer: Tokenizer, prompt: Sequence[int], skip_special_tokens: bool = True) -> None:
        self._tokenizer = tokenizer
        self._skip = skip_special_tokens
        tail = list(prompt[-SEED:])
        whole = self._whole(tail)
        self._context = tail[:whole]
        self._held: list[int] = []
        self._silent = 0  # tokens of the prompt among those held
        self._restart()
        for token in tail[whole:]:
            self.push(token)
        self._silent = len(self._held)

    def push(self, token: int) -> str:
        """The text that is complete with `token`: '' while it ends inside a character."""
        piece: str | None = self._stream.step(self._tokenizer.backend, token)
        self._held.append(token)
        if piece is None:
            return self.flush() if len(self._held) >= PATIENCE else ""
        self._context, self._held, self._silent = self._held, [], 0
        return piece

    def flush(self) -> str:
        """The text of the tokens that still wait, U+FFFD for what is no character."""
        if len(self._held) <= self._silent:
            return ""
        before = self._decode(self._context)
        after = self._decode(self._context + self._held)
        self._restart()
        return after[len(before) :]

    def _restart(self) -> None:
        self._stream = DecodeStream(ids=self._context, skip_special_tokens=self._skip)
        self._held, self._silent = [], 0

    def _whole(self, ids: list[int]) -> int:
        """How many of `ids` there are before an unfinished character at their end."""
        for count in range(len(ids), max(len(ids) - CHARACTER, -1), -1):
            if not self._decode(ids[:count]).endswith(REPLACEMENT):
                return count
        return 0

    def _decode(self, ids: list[int]) -> str:
        return self._tokenizer.decode(ids, skip_special_tokens=self._skip)
