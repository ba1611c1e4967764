"""`StreamParser`: drives a parser that is written as one generator, piece by piece."""

from abc import ABC, abstractmethod

from shared.text.deltas import Delta
from shared.text.text_reader import Steps, TextReader


class StreamParser(ABC):
    """Parses text that comes in pieces. `feed` takes each, and `finish` ends the text.

    The deltas of all calls joined do not depend on how the text was cut.
    """

    def __init__(self) -> None:
        self._reader = TextReader()
        self._deltas: list[Delta] = []
        self._steps = self._parse()

    def feed(self, text: str) -> list[Delta]:
        """Return what `text` adds to the message."""
        self._reader.add(text)
        return self._advance()

    def finish(self) -> list[Delta]:
        """Return what was held back, since it could have been part of something longer. No more text comes."""
        self._reader.end()
        return self._advance()

    @abstractmethod
    def _parse(self) -> Steps[None]:
        """Read the whole text, and append to `_deltas`."""

    def _advance(self) -> list[Delta]:
        next(self._steps, None)
        deltas, self._deltas = self._deltas, []
        return deltas
