"""Messages with one value changed into something that no honest peer sends."""

from collections.abc import Iterator
from math import inf, nan
from typing import Any, NamedTuple

import msgspec

FLOATS = (nan, inf, -inf, 1e308, -1e308)
INTEGERS = (2**63, 2**64 - 1, -(2**63))
STRINGS = ("x" * (2**20 + 1),)
ODD = (None, True, -1, 0, 1, 2**31, 2**62, -0.0, 5e-324, "", "\0", b"", [], [[]], {}, 1e9, 1e11)
"""Values that may be right somewhere."""


class Leaf(NamedTuple):
    """One value in a message, by the indices that lead to it."""

    path: tuple[int, ...]
    value: Any


def leaves(raw: Any, path: tuple[int, ...] = ()) -> Iterator[Leaf]:
    """The values of a message in the form of nested lists, and empty lists, but not the tag."""
    if isinstance(raw, list) and raw:
        for at, inner in enumerate(raw):
            yield from leaves(inner, (*path, at))
    elif path != (0,):
        yield Leaf(path, raw)


def changed(data: bytes, path: tuple[int, ...], value: Any) -> bytes:
    """The message `data` with another value at `path`."""
    raw = msgspec.msgpack.decode(data)
    place = raw
    for at in path[:-1]:
        place = place[at]
    place[path[-1]] = value
    return msgspec.msgpack.encode(raw)
