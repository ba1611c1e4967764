"""`dump_state` and `load_state`: the whole state of a core as bytes, and a core that has it again.

They follow the references from the `Scheduler` on and take every attribute that they find, so a new attribute of any
class belongs to the state at once, and one of a type that they do not know is an error. Equal states give equal bytes.

Objects with an identity (sequences, queues, ...) are numbered, and stand elsewhere as their numbers. Everything else is
a value with a tag for its type. It is no pickle: loading makes objects of the classes below, and nothing else.

A pool has up to two million blocks, and the engine stands still meanwhile. So lists of plain values are handed to the
encoder whole, and lists of equal tuples column by column; and an index's keys by block are not written, since its
entries have them.
"""

import gc
from array import array
from collections import OrderedDict, deque
from types import NoneType
from typing import Any

import msgspec
from msgspec import Struct

from services.scheduler.core.adapters import Adapter, Adapters, Host
from services.scheduler.core.block_manager import BlockManager
from services.scheduler.core.blocks import BlockPool
from services.scheduler.core.counters import Counters
from services.scheduler.core.host_tier import HostTier
from services.scheduler.core.limits import Limits
from services.scheduler.core.plan_builder import InFlightPlan
from services.scheduler.core.planner import Planner
from services.scheduler.core.policy import SortedSequences
from services.scheduler.core.prefix import Entry, PrefixIndex
from services.scheduler.core.quarantine import Quarantine
from services.scheduler.core.queues import Queues
from services.scheduler.core.scheduler import Scheduler
from services.scheduler.core.sequence import BlockTable, Request, Sequence, SequenceProgress, SequenceStats, State
from services.scheduler.core.step_time import StepTime
from services.scheduler.core.swap_policy import SwapPolicy
from shared.errors import ProtocolError
from shared.protocol import (
    Epoch,
    FinishReason,
    LoadAdapter,
    Row,
    Sampling,
    Suspicion,
    UnloadAdapter,
    pack_tokens,
    unpack_tokens,
)

PLAIN = frozenset({bool, int, float, str, bytes, NoneType})

OBJECTS: frozenset[type[Any]] = frozenset(
    (
        *(Scheduler, Counters, BlockManager, BlockPool, PrefixIndex, Queues, SortedSequences, Quarantine, Planner),
        *(Request, Sequence, SequenceProgress, SequenceStats, BlockTable, StepTime, HostTier, SwapPolicy),
        *(Adapters, Adapter),
    )
)
VALUES: frozenset[type[Any]] = frozenset(
    (Limits, Epoch, Sampling, Suspicion, Row, FinishReason, State, Host, LoadAdapter, UnloadAdapter)
)
TUPLES: frozenset[type[Any]] = frozenset((tuple, Entry, InFlightPlan))

_by_name = {kind.__name__: kind for kind in (*OBJECTS, *VALUES, *TUPLES)}
_encoder = msgspec.msgpack.Encoder()


def dump_state(core: Scheduler) -> bytes:
    """Return the state of a core. Raise TypeError if it holds something that cannot be written."""
    dumper = _Dumper()
    collecting = gc.isenabled()
    gc.disable()  # nothing of this is a cycle, and looking for them would double the time
    try:
        dumper.pack(core)
        return _encoder.encode((dumper.attributes, dumper.objects))
    finally:
        if collecting:
            gc.enable()


def load_state(data: bytes) -> Scheduler:
    """Return a core with the state that `dump_state` wrote. Raise ProtocolError if that was another version of it."""
    try:
        attributes, objects = msgspec.msgpack.decode(data)
        core = _Loader(attributes, objects).load()
    except (msgspec.MsgspecError, LookupError, TypeError, ValueError, AttributeError) as error:
        raise ProtocolError(f"not a state of this version of the scheduler's core: {error!r}") from error
    if not isinstance(core, Scheduler):
        raise ProtocolError("not a state of a scheduler's core")
    return core


def _attributes(kind: type[Any], value: object) -> list[str]:
    """Return the names of the attributes of an object, in an order that is always the same."""
    if kind is PrefixIndex:
        return [name for name in PrefixIndex.__slots__ if name != "_keys"]
    if issubclass(kind, Struct):
        return list(kind.__struct_fields__)
    slots = getattr(kind, "__slots__", None)
    return list(vars(value)) if slots is None else list(slots)


class _Dumper:
    """Packs values, and collects the objects that they refer to."""

    def __init__(self) -> None:
        self.attributes: dict[str, list[str]] = {}  # their names by class
        self.objects: list[Any] = []  # (class, values of the attributes)
        self._numbers: dict[int, int] = {}  # by the id of an object

    def pack(self, value: Any) -> Any:
        """Return a value as what msgpack knows."""
        kind = type(value)
        if kind in PLAIN:
            return value
        if kind is list:
            return ["list", self._pack_items(value)]
        if kind is dict or kind is OrderedDict:
            return [kind.__name__, self._pack_items(list(value)), self._pack_items(list(value.values()))]
        if kind is array:
            return ["array", pack_tokens(value)]
        if kind is deque:
            return ["deque", self._pack_items(list(value)), value.maxlen]
        if kind is frozenset:
            return ["frozenset", sorted(value)]
        if kind in TUPLES:
            return [kind.__name__, self._pack_items(value)]
        if kind in VALUES:
            return [kind.__name__, value]
        # a recorded core is a Scheduler; what it has beyond that one is not part of the state
        return ["object", self._number(Scheduler if isinstance(value, Scheduler) else kind, value)]

    def _number(self, kind: type[Any], value: object) -> int:
        number = self._numbers.get(id(value))
        if number is None:
            if kind not in OBJECTS:
                raise TypeError(f"the state of a core cannot hold a {kind.__name__}")
            number = self._numbers[id(value)] = len(self.objects)
            self.objects.append(None)
            if kind.__name__ not in self.attributes:
                self.attributes[kind.__name__] = _attributes(kind, value)
            values = [self.pack(getattr(value, name)) for name in self.attributes[kind.__name__]]
            self.objects[number] = (kind.__name__, values)
        return number

    def _pack_items(self, items: "list[Any] | tuple[Any, ...]") -> Any:
        kinds = set(map(type, items))
        if kinds <= PLAIN:
            return ["plain", items]
        if len(kinds) == 1 and kinds <= TUPLES and items[0] and len(set(map(len, items))) == 1:
            columns = [self._pack_items(column) for column in zip(*items, strict=True)]
            return ["columns", type(items[0]).__name__, columns]
        return ["packed", [self.pack(item) for item in items]]


class _Loader:
    """Makes all objects first, and then gives them their attributes."""

    def __init__(self, attributes: dict[str, list[str]], objects: list[Any]) -> None:
        self._attributes = attributes
        self._packed = objects
        self._objects = [_bare(_by_name[name]) for name, _ in objects]

    def load(self) -> object:
        """Return the first object."""
        for loaded, (name, values) in zip(self._objects, self._packed, strict=True):
            for attribute, value in zip(self._attributes[name], values, strict=True):
                setattr(loaded, attribute, self._unpack(value))
        for loaded in self._objects:
            if isinstance(loaded, PrefixIndex):
                loaded._keys = {entry.block: key for key, entry in loaded._entries.items()}
        return self._objects[0]

    def _unpack(self, packed: Any) -> Any:
        if type(packed) is not list:
            return packed
        match packed:
            case ["object", number]:
                return self._objects[number]
            case ["list", items]:
                return self._unpack_items(items)
            case ["dict", keys, values]:
                return dict(zip(self._unpack_items(keys), self._unpack_items(values), strict=True))
            case ["OrderedDict", keys, values]:
                return OrderedDict(zip(self._unpack_items(keys), self._unpack_items(values), strict=True))
            case ["array", data]:
                return unpack_tokens(data)
            case ["deque", items, maxlen]:
                return deque(self._unpack_items(items), maxlen)
            case ["frozenset", items]:
                return frozenset(items)
            case [name, value]:
                kind = _by_name[name]
                return _tuple(kind, self._unpack_items(value)) if kind in TUPLES else msgspec.convert(value, kind)
        raise ValueError(f"unknown value {packed[:1]}")

    def _unpack_items(self, packed: Any) -> list[Any]:
        match packed:
            case ["plain", items]:
                return list(items)
            case ["columns", name, columns]:
                rows = zip(*[self._unpack_items(column) for column in columns], strict=True)
                return [_tuple(_by_name[name], row) for row in rows]
            case ["packed", items]:
                return [self._unpack(item) for item in items]
        raise ValueError(f"unknown items {packed[:1]}")


def _bare(kind: type[Any]) -> Any:
    """Return an object that has no attributes yet, or in a struct their defaults."""
    return kind() if issubclass(kind, Struct) else object.__new__(kind)


def _tuple(kind: type[Any], items: Any) -> Any:
    return tuple(items) if kind is tuple else kind(*items)
