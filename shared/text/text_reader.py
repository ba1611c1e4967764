"""`TextReader`: reads a text that comes in pieces, as if it were there as a whole.

Its methods that may have to wait are generators. They yield while what they look for could still come, and return once
the text so far, or its end, decides it. So what they return never depends on how the text was cut into pieces, and a
parser made of them is one plain function, which is driven piece by piece (`stream_parser.py`).

`release` drops the text before the cursor. Until then, `unreleased` gives it, and `restart` sets the cursor back.
"""

import re
from collections.abc import Callable, Generator, Sequence
from typing import TypeAlias, TypeVar

from shared.text.stop_strings import prefix_start

ResultT = TypeVar("ResultT")
Parsing: TypeAlias = Generator[None, None, ResultT]
"""Parses a part of a text, and yields whenever it needs more of it."""

_IN_STRING = re.compile(r'["\\]')
_OUTSIDE_STRING = re.compile(r"[^\s\w+\-.,:]")
_SCALAR = re.compile(r"[\w+\-.]*")


class TextReader:
    """A text with a cursor. `add` appends a piece, and `end` says that no more come. Positions count characters.

    Only the text behind the cursor is one string, which is short as long as the methods read what they have seen. The
    text before it is kept in pieces. So the work grows with the text, not with its square, whether it is released or
    not.
    """

    def __init__(self) -> None:
        self.ended = False
        self._kept: list[str] = []  # the text before `_text` that was not released
        self._text = ""  # the last piece, and what was unread before it
        self._start = 0  # position of `_text`
        self._offset = 0  # of the cursor in `_text`

    @property
    def position(self) -> int:
        """Return where the cursor is."""
        return self._start + self._offset

    @property
    def unread(self) -> str:
        """Return the text behind the cursor that has come so far."""
        return self._text[self._offset :]

    def add(self, piece: str) -> None:
        """Append a piece of text."""
        if self._offset:
            self._kept.append(self._text[: self._offset])
        self._text, self._start, self._offset = self.unread + piece, self.position, 0

    def end(self) -> None:
        """Say that no more text comes."""
        self.ended = True

    def release(self) -> None:
        """Drop the text before the cursor, which is not set back behind it any more."""
        self._kept.clear()
        self._text, self._start, self._offset = self.unread, self.position, 0

    def restart(self) -> None:
        """Set the cursor back to the beginning of the text that was not released."""
        kept = "".join(self._kept)
        self._kept.clear()
        self._text, self._start, self._offset = kept + self._text, self._start - len(kept), 0

    def take(self, length: int) -> str:
        """Return up to `length` characters, and put the cursor behind them. They must have come."""
        text = self._text[self._offset : self._offset + length]
        self._offset += len(text)
        return text

    def unreleased(self) -> str:
        """Return the text up to the cursor that was not released."""
        return "".join([*self._kept, self._text[: self._offset]])

    def more(self) -> Parsing[bool]:
        """Wait for more text. Return whether there may be any."""
        if self.ended:
            return False
        yield
        return True

    def peek(self, length: int = 1) -> Parsing[str]:
        """Return the next characters without reading them, fewer than `length` only at the end of the text."""
        while len(self.unread) < length and (yield from self.more()):
            pass
        return self.unread[:length]

    def literal(self, *texts: str) -> Parsing[str]:
        """Read one of `texts` if it comes next: the longest one that does. Return it, or ''."""
        while True:
            unread = self.unread
            if not any(len(text) > len(unread) and text.startswith(unread) for text in texts):
                break
            if not (yield from self.more()):
                break
        return self.take(max((len(text) for text in texts if unread.startswith(text)), default=0))

    def skip(self, characters: str) -> Parsing[None]:
        """Read all `characters` that come next."""
        while True:
            unread = self.unread
            self.take(len(unread) - len(unread.lstrip(characters)))
            if self.unread or not (yield from self.more()):
                return

    def skip_space(self) -> Parsing[None]:
        """Read the white space that comes next."""
        yield from self.skip(" \t\r\n")

    def matching(self, pattern: "re.Pattern[str]", limit: int | None = None) -> Parsing[str]:
        """Read the longest text that `pattern`, a repeated character class, matches; up to `limit` characters of it."""
        pieces: list[str] = []
        while limit is None or limit > 0:
            match = pattern.match(self.unread[:limit])
            pieces.append(self.take(len(match[0]) if match else 0))
            if self.unread or not (yield from self.more()):
                break
            limit = None if limit is None else limit - len(pieces[-1])
        return "".join(pieces)

    def until(self, markers: Sequence[str], show: Callable[[str], None], *, drop_partial: bool = False) -> Parsing[str]:
        """Read up to the first of `markers`, and return it, or '' at the end of the text. It is read too.

        `show` gets the text before the marker in pieces, as soon as they cannot be part of one. All read text is
        released. No marker may be the beginning of another. With `drop_partial`, the beginning of a marker at the end
        of the text is not shown.
        """
        while True:
            unread = self.unread
            start, marker = first_marker(unread, markers)
            if not marker and (drop_partial or not self.ended):
                start = min([prefix_start(unread, other) for other in markers], default=len(unread))
            if start:
                show(self.take(start))
            self.take(len(marker) if marker or not self.ended else len(unread))
            self.release()
            if marker or not (yield from self.more()):
                return marker

    def text_until(self, *markers: str) -> Parsing[tuple[str, str]]:
        """Read the text up to the first of `markers`, and the marker, which is '' at the end of the text.

        Nothing is released.
        """
        pieces: list[str] = []
        while True:
            unread = self.unread
            start, marker = first_marker(unread, markers)
            if not marker and not self.ended:
                start = min(prefix_start(unread, other) for other in markers)
            pieces.append(self.take(start))
            if marker or not (yield from self.more()):
                return "".join(pieces), self.take(len(marker))

    def json_value(self, show: Callable[[str], None]) -> Parsing[bool]:
        """Read one JSON value, which comes next. `show` gets it in pieces, as they come.

        Return whether it came to its end. Brackets outside of strings are counted, not told apart, and numbers are not
        checked. A character that no JSON has outside of strings ends the value early, and is not read.
        """
        if (yield from self.peek()) not in ("{", "[", '"'):
            value = yield from self.matching(_SCALAR)
            show(value)
            return value != ""
        scanner = _JsonScanner()
        while True:
            if length := scanner.scan(self.unread):
                show(self.take(length))
            if scanner.ended is not None:
                return scanner.ended
            if not (yield from self.more()):
                return False

    def json_text(self) -> Parsing[str | None]:
        """Read and return the text of one JSON value; None if it is not one or does not end."""
        pieces: list[str] = []
        ended = yield from self.json_value(pieces.append)
        return "".join(pieces) if ended else None


class _JsonScanner:
    """Finds the end of a JSON value that is an object, a list or a string, in text that comes in pieces."""

    def __init__(self) -> None:
        self.ended: bool | None = None  # False: by a character that is not JSON
        self._depth = 0  # of brackets
        self._in_string = self._escaped = False

    def scan(self, text: str) -> int:
        """Return the number of characters at the start of `text` that belong to the value."""
        at = 0
        while at < len(text) and self.ended is None:
            if self._escaped:
                at, self._escaped = at + 1, False
                continue
            mark = (_IN_STRING if self._in_string else _OUTSIDE_STRING).search(text, at)
            if mark is None:
                return len(text)
            at = mark.end() if self._read(mark[0]) else mark.start()
        return at

    def _read(self, mark: str) -> bool:
        """Take a character into account. Return whether it belongs to the value."""
        if mark == "\\" and self._in_string:
            self._escaped = True
            return True
        if mark == '"':
            self._in_string = not self._in_string
        elif mark in "{[":
            self._depth += 1
        elif mark in "}]":
            self._depth -= 1
        else:
            self.ended = False
            return False
        if not self._depth and not self._in_string:
            self.ended = True
        return True


def first_marker(text: str, markers: Sequence[str]) -> tuple[int, str]:
    """Return the start and the text of the marker that comes first; the end of `text` and '' if there is none."""
    matches = [(start, marker) for marker in markers if (start := text.find(marker)) >= 0]
    return min(matches, default=(len(text), ""))
