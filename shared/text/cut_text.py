"""`CutText`: a text that is cut at some places before it is tokenized, so that no token reaches over one.

A chat's prompt is cut inside the names of special tokens that a message has, if they are to stay text.
"""

import itertools
import re
from collections.abc import Collection, Iterable, Mapping
from typing import Any, SupportsIndex


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
        self._first = re.compile(f"(?=(?:{'|'.join(map(re.escape, names))}))(.)", re.DOTALL)

    def mark(self, value: Any, mark: str) -> Any:
        """Return a copy of a JSON value with `mark` behind the first character of each name in it.

        Names may overlap, and a name may be in another one, so each is looked for where the one before begins.
        """
        match value:
            case str():
                return self._first.sub(rf"\g<1>{mark}", value)
            case Mapping():
                return {self.mark(key, mark): self.mark(item, mark) for key, item in value.items()}
            case list():
                return [self.mark(item, mark) for item in value]
        return value
