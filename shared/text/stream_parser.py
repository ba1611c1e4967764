"""`StreamParser`: drives a parser that is written as one generator, piece by piece."""

from abc import ABC, abstractmethod

from shared.text.deltas import Delta
from shared.text.text_reader import Parsing, TextReader


class StreamParser(ABC):
    """Parses text that comes in pieces. `feed` takes each, and `finish` ends the text.

    The deltas of all calls joined do not depend on how the text was cut.
    """

    def __init__(self) -> None:
        self._reader = TextReader()
        self._deltas: list[Delta] = []
        self._parsing = self._parse()

    def feed(self, text: str) -> list[Delta]:
        """Return what `text` adds to the message."""
        self._reader.add(text)
        return self._advance()

    def finish(self) -> list[Delta]:
        """Return what was held back, since it could have been part of something longer. No more text comes."""
        self._reader.end()
        return self._advance()

    @abstractmethod
    def _parse(self) -> Parsing[None]:
        """Read the whole text, and append to `_deltas`."""

    def _advance(self) -> list[Delta]:
        next(self._parsing, None)
        deltas, self._deltas = self._deltas, []
        return deltas


class TrailingSpace:
    """Holds back the white space at the end of a text that comes in pieces, since it may have to be dropped there."""

    def __init__(self) -> None:
        self._held: list[str] = []

    def push(self, text: str) -> str:
        """Return the text that can be shown now: all that was held back and `text`, but for the space at its end."""
        shown = text.rstrip()
        before = self.flush() if shown else ""
        if len(shown) < len(text):
            self._held.append(text[len(shown) :])
        return before + shown

    def drop(self) -> None:
        """Drop the space that is held back."""
        self._held.clear()

    def flush(self) -> str:
        """Return the space that was held back."""
        held = "".join(self._held)
        self._held.clear()
        return held
