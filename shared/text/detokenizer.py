"""`Detokenizer`: turns one sequence's tokens into text as they come, in whole characters.

Tokens stand for bytes (`shared/text/token_bytes.py`), and the text is all bytes decoded as UTF-8. At most the beginning
of a character is held back, three bytes. Bytes that cannot be a character become U+FFFD as soon as that is certain. So
the pieces joined are what `Tokenizer.decode` returns for all tokens at once, whatever the tokens are.

The text of the prompt is not returned. If the prompt ends inside a character, those bytes are held back for the rest.
"""

from collections.abc import Sequence

from shared.text.token_bytes import decode_utf8
from shared.text.tokenizer import Tokenizer

MAX_CHARACTER_BYTES = 4


class Detokenizer:
    """`push` takes each token and `flush` ends the sequence. The pieces joined are the text of the output tokens.

    With `echo`, the caller shows the prompt before them, with its special tokens and without an incomplete character.
    """

    def __init__(
        self, tokenizer: Tokenizer, prompt: Sequence[int], skip_special_tokens: bool = True, *, echo: bool = False
    ) -> None:
        self._bytes = tokenizer.bytes
        self._later = tokenizer.bytes.later
        self._held = b""  # the beginning of a character
        self._begun = False  # whether any token has become text
        self._strip = tokenizer.bytes.max_stripped  # characters that may still be stripped from the start of the text
        self._hidden = tokenizer.special_ids if skip_special_tokens and not echo else frozenset()
        self._read(prompt)
        self._hidden = tokenizer.special_ids if skip_special_tokens else frozenset()
        self._silent = not echo  # whether `_held` is the prompt's, which is not returned

    @property
    def at_start(self) -> bool:
        """Return whether the next token is the first of its text."""
        return not self._begun

    def push(self, token: int) -> str:
        """Return the text that `token` completes: '' while it ends inside a character."""
        if token in self._hidden:
            return ""
        piece = self._later[token] if self._begun else self._begin(token)
        if not piece:
            return ""
        self._silent = False
        text, self._held = decode_utf8(self._held + piece)
        return self._stripped(text) if self._strip else text

    def flush(self) -> str:
        """Return U+FFFD if the tokens end inside a character, else ''. No more tokens come."""
        held, self._held = self._held, b""
        return "" if self._silent else held.decode(errors="replace")

    def breaks_character(self, token: int) -> bool:
        """Return whether `token` does not continue the held character, so that U+FFFD comes before its text."""
        if not self._held or token in self._hidden:
            return False
        text, rest = decode_utf8(self._held + self._later[token][:1])
        return len(text) > 1 or (len(text) == 1 and rest != b"")

    def _read(self, prompt: Sequence[int]) -> None:
        """Read the end of the prompt: enough bytes to have the start of a character after all that may be stripped."""
        at, size, enough = len(prompt), 0, MAX_CHARACTER_BYTES * (self._strip + 1)
        while at and size < enough:
            at -= 1
            size += 0 if prompt[at] in self._hidden else len(self._later[prompt[at]])
        if at:
            self._begun, self._strip = True, 0
        for token in prompt[at:]:
            self.push(token)

    def _begin(self, token: int) -> bytes:
        first = self._bytes.first(token)
        self._begun = first is not None
        return first or b""

    def _stripped(self, text: str) -> str:
        text, self._strip = self._bytes.strip(text, self._strip)
        return text
