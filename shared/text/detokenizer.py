"""`Detokenizer`: one sequence's tokens to text, as they come, never half a character.

Tokens stand for bytes (`shared/text/bytes.py`), and the text is all bytes read as UTF-8. What waits is never more than
the beginning of a character, three bytes; bytes that can be no character are U+FFFD as soon as that is certain. So the
pieces joined are what `Tokenizer.decode` makes of all tokens at once, whatever the tokens are.

Nothing of the prompt is given out again. If it ends inside a character, those bytes wait for the rest.
"""

from collections.abc import Sequence

from shared.text.bytes import read_text
from shared.text.tokenizer import Tokenizer

CHARACTER = 4  # bytes of the longest


class Detokenizer:
    """`push` each token, then `flush`; the pieces joined are the text of the tokens behind the prompt.

    With `echo` the prompt is shown before them: special tokens included, an unfinished character at its end not.
    """

    def __init__(
        self, tokenizer: Tokenizer, prompt: Sequence[int], skip_special_tokens: bool = True, *, echo: bool = False
    ) -> None:
        self._bytes = tokenizer.bytes
        self._later = tokenizer.bytes.later
        self._held = b""  # the beginning of a character
        self._begun = False  # whether any token was shown
        self._strip = tokenizer.bytes.most_stripped  # characters that may yet go from the start of the text
        self._hidden = tokenizer.special_ids if skip_special_tokens and not echo else frozenset()
        self._read(prompt)
        self._hidden = tokenizer.special_ids if skip_special_tokens else frozenset()
        self._silent = not echo  # whether what is held is the prompt's, which does not show

    @property
    def at_start(self) -> bool:
        """Return whether the next token that shows is the first of its text."""
        return not self._begun

    def push(self, token: int) -> str:
        """Return the text that is certain with `token`: '' while it ends inside a character."""
        if token in self._hidden:
            return ""
        piece = self._later[token] if self._begun else self._begin(token)
        if not piece:
            return ""
        self._silent = False
        text, self._held = read_text(self._held + piece)
        return self._stripped(text) if self._strip else text

    def flush(self) -> str:
        """Return U+FFFD if the tokens end inside a character; no more tokens come."""
        held, self._held = self._held, b""
        return "" if self._silent else held.decode(errors="replace")

    def breaks(self, token: int) -> bool:
        """Return whether `token` does not go on with the character that waits, so that U+FFFD comes before its text."""
        if not self._held or token in self._hidden:
            return False
        text, rest = read_text(self._held + self._later[token][:1])
        return len(text) > 1 or (len(text) == 1 and rest != b"")

    def _read(self, prompt: Sequence[int]) -> None:
        """Take in the end of the prompt: bytes in which surely a character begins, behind all that may be stripped."""
        at, size, enough = len(prompt), 0, CHARACTER * (self._strip + 1)
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
