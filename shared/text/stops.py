"""`StopMatcher`: finds the first of several stop strings in text that comes in pieces.

Holds back only what could still become a stop string: the longest end of the text that is a beginning of one. The
stop string found is the one whose last character comes first, so the result does not depend on how the text is cut.
"""

from collections.abc import Sequence


class StopMatcher:
    """`push` each piece, then `flush`; `matched` is the stop string once there was one, and then it is over."""

    def __init__(self, stops: Sequence[str], include: bool = False) -> None:
        self.matched: str | None = None
        self._stops = stops
        self._include = include
        self._held = ""

    def push(self, piece: str, armed: bool = True) -> str:
        """The text that may be shown now. Only a stop string that ends in an `armed` piece counts."""
        if not piece:
            return ""
        text = self._held + piece
        found = self._find(text) if armed else None
        if found is not None:
            start, self.matched = found
            self._held = ""
            return text[: start + len(self.matched)] if self._include else text[:start]
        shown = min(self._beginning(text, stop) for stop in self._stops) if self._stops else len(text)
        self._held = text[shown:]
        return text[:shown]

    def flush(self) -> str:
        """What was held back; the text is at its end."""
        held, self._held = self._held, ""
        return held

    def _find(self, text: str) -> tuple[int, str] | None:
        """Start and stop string of the match that ends first, and starts first of those, behind the held text."""
        found = []
        for stop in self._stops:
            start = text.find(stop, max(len(self._held) - len(stop) + 1, 0))
            if start >= 0:
                found.append((start + len(stop), start, stop))
        return min(found)[1:] if found else None

    @staticmethod
    def _beginning(text: str, stop: str) -> int:
        """Where the longest end of `text` begins that is a beginning of `stop`, but not all of it."""
        at = text.find(stop[0], max(len(text) - len(stop) + 1, 0))
        while at >= 0 and not stop.startswith(text[at:]):
            at = text.find(stop[0], at + 1)
        return at if at >= 0 else len(text)
