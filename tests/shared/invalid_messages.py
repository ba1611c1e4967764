"""Encoded messages in which one value is replaced by one that no correct peer sends."""

from collections.abc import Iterator
from math import inf, nan
from typing import Any, NamedTuple

import msgspec

FLOATS = (nan, inf, -inf, 1e308, -1e308)
INTEGERS = (2**63, 2**64 - 1, -(2**63))
STRINGS = ("x" * (2**20 + 1),)
ODD = (None, True, -1, 0, 1, 2**31, 2**62, -0.0, 5e-324, "", "\0", b"", [], [[]], {}, 1e9, 1e11)
"""Values that are valid in some fields."""


class Leaf(NamedTuple):
    """A value in a message, and the indices that lead to it."""

    path: tuple[int, ...]
    value: Any


def leaves(raw: Any, path: tuple[int, ...] = ()) -> Iterator[Leaf]:
    """Yield the values of a message, which is nested lists, and its empty lists, but not the tag."""
    if isinstance(raw, list) and raw:
        for index, inner in enumerate(raw):
            yield from leaves(inner, (*path, index))
    elif path != (0,):
        yield Leaf(path, raw)


def changed(data: bytes, path: tuple[int, ...], value: Any) -> bytes:
    """Return the message `data` with another value at `path`."""
    raw = msgspec.msgpack.decode(data)
    parent = raw
    for index in path[:-1]:
        parent = parent[index]
    parent[path[-1]] = value
    return msgspec.msgpack.encode(raw)
