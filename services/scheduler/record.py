"""The format of a record: the inputs of a core in the order in which they came, in files that begin with its state.

A file is `MAGIC`, a `Head`, and then one input after the other, each with its length before it (4 bytes,
little-endian). The core is a pure function of its inputs, so a head and the inputs behind it lead to the same states
again. What the core answered is not written, except a digest of each plan, by which a replay notices that it has gone
astray.

A record holds the token ids of prompts and outputs. Digests would not do: the core compares tokens to find stop tokens
and equal blocks, whose borders depend on what was generated before. So it is as private as the prompts are.
"""

import hashlib
import zlib
from pathlib import Path
from typing import Any, NamedTuple

import msgspec
from msgspec import Struct

from services.scheduler.core import Limits, WorkerResources
from shared.errors import ConfigError
from shared.protocol import VERSION, AdapterLoaded, AdapterRefused, Epoch, StepPlan, StepResult, Submit, encode

MAGIC = b"quire record 3\n"
LENGTH_BYTES = 4


class Head(Struct, frozen=True, array_like=True):
    """The first entry of a file."""

    protocol: int  # `VERSION` of the messages below
    engine: str
    model: str
    started: float  # wall clock at the file's begin, in seconds since the epoch
    now: float  # the core's clock at the same moment
    continues: bool  # the process has recorded before; its former file may have been deleted
    limits: Limits
    state: bytes  # of the core; see core/state.py


# The inputs. Each says when it came; the core was told that time if its method asks for it.


class Began(Struct, frozen=True, array_like=True, tag=1):
    """`begin_epoch`."""

    now: float
    epoch: Epoch
    num_blocks: int
    worker: WorkerResources


class Submitted(Struct, frozen=True, array_like=True, tag=2):
    """`submit`."""

    now: float
    request: Submit


class Aborted(Struct, frozen=True, array_like=True, tag=3):
    """`abort`."""

    now: float
    id: int
    sample: int


class Planned(Struct, frozen=True, array_like=True, tag=4, gc=False):
    """`plan`. A call that returned nothing matters as well: it tells the core the time, and may have preempted."""

    now: float
    digest: int | None  # of the plan; None if there was none


class Committed(Struct, frozen=True, array_like=True, tag=5):
    """`commit`."""

    now: float
    result: StepResult


class CommittedEncoded(Struct, frozen=True, array_like=True, tag=5, gc=False):
    """The same as `Committed`, to write a result as it came from the worker."""

    now: float
    result: msgspec.Raw


class Lost(Struct, frozen=True, array_like=True, tag=6):
    """`lose_worker`."""

    now: float
    out_of_memory: bool


class Drained(Struct, frozen=True, array_like=True, tag=7):
    """`drain`."""

    now: float


class Ended(Struct, frozen=True, array_like=True, tag=8):
    """The end of a file: the process ended in good order, or went on in the next file. It is no input."""

    digest: bytes  # of the state


class Left(Struct, frozen=True, array_like=True, tag=9):
    """`end_epoch`."""

    now: float


class Reset(Struct, frozen=True, array_like=True, tag=10):
    """`reset_prefix_cache`."""

    now: float


class AdapterAdded(Struct, frozen=True, array_like=True, tag=11):
    """`add_adapter`."""

    now: float
    name: str
    path: str
    replaces: bool


class AdapterRemoved(Struct, frozen=True, array_like=True, tag=12):
    """`remove_adapter`."""

    now: float
    name: str


class AdapterAnswered(Struct, frozen=True, array_like=True, tag=13):
    """`adapter_loaded` or `adapter_refused`."""

    now: float
    answer: AdapterLoaded | AdapterRefused


class AdapterMessagesTaken(Struct, frozen=True, array_like=True, tag=14):
    """`take_adapter_messages`, if there were any: the core no longer has them."""

    now: float


AdapterInput = AdapterAdded | AdapterRemoved | AdapterAnswered | AdapterMessagesTaken
Input = Began | Submitted | Aborted | Planned | Committed | Lost | Drained | Left | Reset | AdapterInput
Entry = Input | Ended

_encoder = msgspec.msgpack.Encoder()
_head = msgspec.msgpack.Decoder(Head)
_entry = msgspec.msgpack.Decoder(Entry)


def pack_entry(entry: Struct) -> bytes:
    """Return an entry of a file with its length before it."""
    data = _encoder.encode(entry)
    return len(data).to_bytes(LENGTH_BYTES, "little") + data


def plan_digest(plan: StepPlan | None) -> int | None:
    """Return the digest of a plan; None for None."""
    return None if plan is None else digest(encode(plan))


def digest(encoded_plan: bytes) -> int:
    """Return 32 bits of digest: more would cost each step more time, and a wrong plan leads to others."""
    return zlib.crc32(encoded_plan)


def state_digest(state: bytes) -> bytes:
    """Return the digest of a core's state."""
    return hashlib.blake2b(state, digest_size=16).digest()


class Record(NamedTuple):
    """The content of one file."""

    path: Path
    head: Head
    entries: list[Entry]
    torn_bytes: int  # at the end: of an entry that was being written when the process was killed


def read_record(path: Path) -> Record:
    """Read a file. Raise `ConfigError` if it is no record, was made by another version, or is damaged."""
    try:
        data = path.read_bytes()
    except OSError as error:
        raise ConfigError(f"{path}: {error.strerror}") from error
    if not data.startswith(MAGIC):
        raise ConfigError(f"{path} is not a record of this version of Quire")
    chunks, torn_bytes = _split(data)
    entries: list[Any] = []
    for position, chunk in chunks:
        try:
            entries.append(_entry.decode(chunk) if entries else _head.decode(chunk))
        except msgspec.MsgspecError as error:
            raise ConfigError(f"{path} is damaged at byte {position}: {error}") from error
    if not entries:
        raise ConfigError(f"{path} ends before its head is complete")
    head = entries.pop(0)
    if head.protocol != VERSION:
        raise ConfigError(f"{path} was made with version {head.protocol} of the messages; this is version {VERSION}")
    return Record(path, head, entries, torn_bytes)


def _split(data: bytes) -> tuple[list[tuple[int, bytes]], int]:
    """Return the entries with their positions, and the number of bytes of one that is incomplete."""
    chunks = []
    position = len(MAGIC)
    while position + LENGTH_BYTES <= len(data):
        start = position + LENGTH_BYTES
        end = start + int.from_bytes(data[position:start], "little")
        if end > len(data):
            break
        chunks.append((position, data[start:end]))
        position = end
    return chunks, len(data) - position
