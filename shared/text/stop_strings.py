"""`StopMatcher`: finds the first of several stop strings in text that comes in pieces.

It holds back only what could still become a stop string: the longest suffix of the text that is a prefix of one. The
match is the one whose last character comes first, so the result does not depend on how the text is cut into pieces.
"""

from collections.abc import Sequence


class StopMatcher:
    """Searches a text: `push` takes each piece, and `flush` ends the text. `matched` is the stop string, once found."""

    def __init__(self, stops: Sequence[str], include: bool = False) -> None:
        self.matched: str | None = None
        self._stops = stops
        self._include = include
        self._held = ""

    def push(self, piece: str, can_match: bool = True) -> str:
        """Return the text that can be shown now. A stop string that ends in this piece counts only if `can_match`."""
        if not piece:
            return ""
        text = self._held + piece
        match = self._find(text) if can_match else None
        if match is not None:
            start, self.matched = match
            self._held = ""
            return text[: start + len(self.matched)] if self._include else text[:start]
        num_shown = min(prefix_start(text, stop) for stop in self._stops) if self._stops else len(text)
        self._held = text[num_shown:]
        return text[:num_shown]

    def flush(self) -> str:
        """Return the text that was held back, at the end of the text."""
        held, self._held = self._held, ""
        return held

    def _find(self, text: str) -> tuple[int, str] | None:
        """Return the start and the stop string of the match that ends first (then: that starts first), or None."""
        matches = []
        for stop in self._stops:
            start = text.find(stop, max(len(self._held) - len(stop) + 1, 0))
            if start >= 0:
                matches.append((start + len(stop), start, stop))
        return min(matches)[1:] if matches else None


def prefix_start(text: str, stop: str) -> int:
    """Return the start of the longest suffix of `text` that is a proper prefix of `stop`, or the end of `text`."""
    start = text.find(stop[0], max(len(text) - len(stop) + 1, 0))
    while start >= 0 and not stop.startswith(text[start:]):
        start = text.find(stop[0], start + 1)
    return start if start >= 0 else len(text)
