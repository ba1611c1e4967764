"""`Detokenizer`: turns one sequence's tokens into text as they come, in whole characters.

Tokens stand for bytes (`shared/text/token_bytes.py`), and the text is all bytes decoded as UTF-8. At most three bytes
are held back, which begin a character. Invalid bytes become U+FFFD as soon as they are known to be invalid. So the
pieces joined are what `Tokenizer.decode` returns for all tokens at once.

The text of the prompt is not returned. If the prompt ends inside a character, its first bytes are held back until the
output completes it.
"""

from collections.abc import Mapping, Sequence

from shared.text.token_bytes import decode_utf8
from shared.text.tokenizer import Tokenizer

MAX_CHARACTER_BYTES = 4


class Detokenizer:
    """`push` takes each token and `flush` ends the sequence. The pieces joined are the text of the output tokens.

    With `echo`, the caller shows the prompt before the output, with special tokens, without an incomplete character.
    `shown_special` are special tokens of the output that are not skipped. Some tokenizers write a space between any two
    words; without `spaces_between_special_tokens`, an added token gets none right behind another one, if all are shown.
    """

    def __init__(
        self,
        tokenizer: Tokenizer,
        prompt: Sequence[int],
        skip_special_tokens: bool = True,
        *,
        echo: bool = False,
        shown_special: frozenset[int] = frozenset(),
        spaces_between_special_tokens: bool = True,
    ) -> None:
        self._bytes = tokenizer.bytes
        self._later = tokenizer.bytes.later
        self._held = b""  # the beginning of a character
        self._begun = False  # whether a token has become text
        self._strip = tokenizer.bytes.max_stripped  # characters that may still be stripped from the start of the text
        self._hidden = tokenizer.special_ids if skip_special_tokens and not echo else frozenset()
        self._unspaced: Mapping[int, str] = {}  # added tokens that get no space right behind another one
        self._after_unspaced = False
        self._read_prompt(prompt)
        if not spaces_between_special_tokens and not skip_special_tokens:
            self._unspaced = tokenizer.added_tokens
        self._hidden = tokenizer.special_ids if skip_special_tokens else frozenset()
        if shown_special:
            self._hidden -= shown_special
        self._held_is_hidden = not echo  # `_held` is of the prompt, which is not shown

    @property
    def at_start(self) -> bool:
        """Return whether the next token is the first of its text."""
        return not self._begun

    def hides(self, token: int) -> bool:
        """Return whether `token` is a special token of the output that is not shown."""
        return token in self._hidden

    def push(self, token: int) -> str:
        """Return the text that `token` completes, which is '' if the bytes so far end inside a character."""
        if token in self._hidden:
            return ""
        piece = self._later[token] if self._begun else self._begin(token)
        if self._unspaced:
            piece = self._without_space(token, piece)
        if not piece:
            return ""
        self._held_is_hidden = False
        if not self._held and piece.isascii():
            text = piece.decode()
        else:
            text, self._held = decode_utf8(self._held + piece)
        return self._stripped(text) if self._strip else text

    def flush(self) -> str:
        """Return U+FFFD if the tokens end inside a character, else ''. No more tokens come."""
        held, self._held = self._held, b""
        return "" if self._held_is_hidden else held.decode(errors="replace")

    def breaks_character(self, token: int) -> bool:
        """Return whether `token` does not continue the held character, so that U+FFFD comes before its text."""
        if not self._held or token in self._hidden:
            return False
        text, rest = decode_utf8(self._held + self._later[token][:1])
        return len(text) > 1 or (len(text) == 1 and rest != b"")

    def _read_prompt(self, prompt: Sequence[int]) -> None:
        """Read the end of the prompt: enough bytes for a whole character after all that may be stripped."""
        start, size, enough = len(prompt), 0, MAX_CHARACTER_BYTES * (self._strip + 1)
        while start and size < enough:
            start -= 1
            size += 0 if prompt[start] in self._hidden else len(self._later[prompt[start]])
        if start:
            self._begun, self._strip = True, 0
        for token in prompt[start:]:
            self.push(token)

    def _without_space(self, token: int, piece: bytes) -> bytes:
        """Return the bytes of a token, which are the bare ones for an added token that comes after another one."""
        after, self._after_unspaced = self._after_unspaced, token in self._unspaced
        return self._unspaced[token].encode() if after and self._after_unspaced else piece

    def _begin(self, token: int) -> bytes:
        first = self._bytes.first(token)
        self._begun = first is not None
        return first or b""

    def _stripped(self, text: str) -> str:
        text, self._strip = self._bytes.strip(text, self._strip)
        return text
