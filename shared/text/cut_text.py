"""`CutText`: a text that is cut at some places before it is tokenized, so that no token reaches over one.

A chat's prompt is cut inside the names of special tokens that a message has, if they are to stay text.
"""

import itertools
import re
from collections.abc import Collection, Iterable, Mapping
from typing import Any, SupportsIndex

MAX_CUTS = 4096
"""Cuts of one text: tokenizing a piece takes some twenty microseconds, however short it is."""

WINDOW = 1_000_000
"""Characters that are searched in one call, which holds the interpreter: that takes some ten milliseconds at most."""


class CutText(str):
    """A text and its `cuts`: the number of characters before each of them, in order. `str` gives the text alone."""

    cuts: tuple[int, ...]

    def __new__(cls, text: str, cuts: Iterable[int] = ()) -> "CutText":
        self = super().__new__(cls, text)
        self.cuts = tuple(cuts)
        return self

    @classmethod
    def at(cls, mark: str, text: str) -> "CutText":
        """Return `text` without the marks in it, cut where they were."""
        pieces = text.split(mark)
        return cls("".join(pieces), itertools.accumulate(map(len, pieces[:-1])))

    @property
    def pieces(self) -> list[str]:
        """Return the parts between the cuts. None is empty, unless the text is."""
        text, bounds = str(self), [0, *self.cuts, len(self)]
        return [text[begin:end] for begin, end in itertools.pairwise(bounds) if begin < end] or [""]

    def __getitem__(self, key: SupportsIndex | slice) -> str:
        """Return a character, or a part of the text with the cuts inside it."""
        if not isinstance(key, slice):
            return super().__getitem__(key)
        begin, end, step = key.indices(len(self))
        assert step == 1
        return CutText(super().__getitem__(key), (cut - begin for cut in self.cuts if begin < cut < end))


class NameCutter:
    """Marks in a message where the names of special tokens have to be cut."""

    def __init__(self, names: Collection[str]) -> None:
        """`names` are those of the special tokens; there is at least one."""
        self._names = re.compile(f"(?=({_pattern(names)}))")  # which may overlap
        self._max_length = max(map(len, names))
        self._beginnings = {name[:length] for name in names for length in range(1, len(name))}

    def mark(self, value: Any, mark: str) -> Any:
        """Return a copy of a JSON value with `mark` behind the first character of each name in it.

        A beginning of a name at the end of a text is marked too: a template may write another text right behind it.
        """
        match value:
            case str():
                bounds = [0, *sorted(self._cuts(value)), len(value)]
                return mark.join(value[begin:end] for begin, end in itertools.pairwise(bounds))
            case Mapping():
                return {self.mark(key, mark): self.mark(item, mark) for key, item in value.items()}
            case list():
                return [self.mark(item, mark) for item in value]
        return value

    def _cuts(self, text: str) -> set[int]:
        """Return the number of characters before each cut."""
        cuts = {
            name.start() + 1
            for start in range(0, len(text), WINDOW)
            for name in self._names.finditer(text, start, start + WINDOW + self._max_length)
        }
        last = range(max(len(text) - self._max_length, 0), len(text))
        return cuts | {start + 1 for start in last if text[start:] in self._beginnings}


def _pattern(names: Collection[str]) -> str:
    """Return a regular expression for the longest of `names` at a place.

    What names have in common is written once: trying hundreds one by one takes half a second for a megabyte of their
    common beginning.
    """
    alternatives = []
    for _, group in itertools.groupby(sorted(filter(None, names)), key=lambda name: name[0]):
        same_first = list(group)
        pairs = zip(same_first[0], same_first[-1], strict=False)  # what these two share, those between them have too
        length = sum(1 for _ in itertools.takewhile(lambda pair: pair[0] == pair[1], pairs))
        alternatives.append(re.escape(same_first[0][:length]) + _pattern({name[length:] for name in same_first}))
    if "" in names:
        alternatives.append("")
    return alternatives[0] if len(alternatives) == 1 else f"(?:{'|'.join(alternatives)})"
