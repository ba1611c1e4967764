"""Frames that no honest peer sends, drawn from a seed, and peers that send them as fast as they are taken.

What is drawn: random bytes, real messages that are cut off, have flipped bits, another tag or a number out of range,
messages of other directions, replayed ones, deep nesting, empty messages, and messages of too many frames. A `Flood`
says how many of them no decoder takes, so that a test can compare that number with what a process has counted.
"""

import socket
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from random import Random
from typing import Any

import msgspec
import zmq
from msgspec import Struct

from shared.errors import ProtocolError
from shared.protocol import encode
from shared.transport import MALFORMED_LIMIT, connect
from tests.shared.invalid_messages import FLOATS, INTEGERS, ODD, changed, leaves
from tests.shared.test_transport import command, frame
from tests.waiting import PATIENCE

CONNECTION_FRAMES = 500
"""Messages that a hostile peer sends before it connects under a new identity."""

HOSTILE_VALUES: tuple[Any, ...] = (*FLOATS, *INTEGERS, *ODD, "x" * 5000, "\n\x1b[31m", [0] * 5000)
SIZES = (*[40] * 60, *[600] * 30, *[20_000] * 8, 1_000_000)  # of random bytes, at most
LINGER_MS = 60_000
VALID = 0.1  # part of the connections over which all messages can be decoded; they are the longest
STAYING = 0.05  # part of the connections that stay open until a flood's block ends

Decoder = Callable[[bytes], object]
Frames = list[bytes]


class Flood(Struct):
    """What hostile peers have sent."""

    sent: int = 0
    size: int = 0  # bytes
    malformed: int = 0  # messages with a wrong number of frames, or that no decoder takes
    staying_malformed: int = 0  # those of them over connections that stay open

    @property
    def memory(self) -> int:
        """Return the bytes that the messages take where they wait to be read, with libzmq's own for each."""
        return self.size + 128 * self.sent

    def add(self, sent: "Flood", *, stays: bool) -> None:
        """Add what was sent over a connection, which stays open or not."""
        self.sent += sent.sent
        self.size += sent.size
        self.malformed += sent.malformed
        self.staying_malformed += sent.malformed if stays else 0


class HostileFrames:
    """Draws messages. `real` are those of the socket's own direction, `foreign` those of others."""

    def __init__(self, seed: object, real: Sequence[Struct], foreign: Sequence[Struct]) -> None:
        self.rng = Random(repr(seed))
        self._real = [encode(message) for message in real]
        self._foreign = [encode(message) for message in foreign]
        self._kinds: tuple[Callable[[], Frames], ...] = (
            self._random_bytes,
            self._cut,
            self._flipped,
            self._flipped,
            self._replayed,
            self._replayed,
            self._of_another_direction,
            self._with_another_tag,
            self._with_a_hostile_value,
            self._with_a_hostile_value,
            self._nested,
            self._many_frames,
        )

    def draw(self) -> Frames:
        """Return the frames of the next message."""
        return self.rng.choice(self._kinds)()

    def draw_valid(self, decode: Decoder, excluded: Callable[[Any], bool]) -> bytes:
        """Return the next message that `decode` takes, and that is not `excluded`."""
        while True:
            frames = self.draw()
            if not is_malformed(frames, decode) and not excluded(decode(frames[0])):
                return frames[0]

    def identity(self) -> bytes:
        """Return an identity for a socket, which may have any bytes but a leading zero."""
        return b"h" + self.rng.randbytes(self.rng.choice([8, 8, 254]))

    def _random_bytes(self) -> Frames:
        return [self.rng.randbytes(self.rng.randint(0, self.rng.choice(SIZES)))]

    def _cut(self) -> Frames:
        body = self.rng.choice(self._real)
        return [body[: self.rng.randrange(len(body))]]

    def _flipped(self) -> Frames:
        body = bytearray(self.rng.choice(self._real))
        for _ in range(self.rng.randint(1, 4)):
            body[self.rng.randrange(len(body))] ^= 1 << self.rng.randrange(8)
        return [bytes(body)]

    def _replayed(self) -> Frames:
        return [self.rng.choice(self._real)]

    def _of_another_direction(self) -> Frames:
        return [self.rng.choice(self._foreign)]

    def _with_another_tag(self) -> Frames:
        fields = msgspec.msgpack.decode(self.rng.choice(self._real))
        fields[0] = self.rng.choice([*range(10), 99, -1, 2**63, "1", None, []])
        return [msgspec.msgpack.encode(fields)]

    def _with_a_hostile_value(self) -> Frames:
        body = self.rng.choice(self._real)
        places = list(leaves(msgspec.msgpack.decode(body)))
        if not places:
            return [body]
        return [changed(body, self.rng.choice(places).path, self.rng.choice(HOSTILE_VALUES))]

    def _nested(self) -> Frames:
        return [self.rng.choice([b"\x91", b"\x81", b"\xdd\xff\xff\xff\xff", b"\x92\x02"]) * self.rng.randint(0, 5000)]

    def _many_frames(self) -> Frames:
        count = self.rng.choice([2, 2, 3, 50])
        return [self.rng.choice([b"", *self._real]) for _ in range(count)]


def is_malformed(frames: Sequence[bytes], decode: Decoder) -> bool:
    """Return whether a message must be dropped without a look at what it says."""
    if len(frames) != 1:
        return True
    try:
        decode(frames[0])
    except ProtocolError:
        return True
    return False


@contextmanager
def flood(
    address: str, frames: HostileFrames, count: int, decode: Decoder, answered: Struct | None = None
) -> Iterator[Flood]:
    """Send `count` messages to a listener, over one connection after the other, and yield what was sent.

    On some connections, the longest, all of them can be decoded. The others end before the listener would end them for
    nonsense. Half of the connections read what comes. Each begins and ends with the message `answered`, if there is one
    that gets an answer. Most are closed at once, so that what they sent waits without them; some are open until the
    block ends.
    """
    result = Flood()
    with zmq.Context() as context, ExitStack() as staying:
        while result.sent < count:
            stays = frames.rng.random() < STAYING
            with ExitStack() as leaving:
                connection = connect(context, address, frames.identity())
                peer, _ = (staying if stays else leaving).enter_context(connection)
                result.add(_send_some(peer, frames, count - result.sent, decode, answered), stays=stays)
                peer.setsockopt(zmq.LINGER, LINGER_MS)  # the context waits for it, so that all leaves this process
        yield result


def _send_some(
    peer: "zmq.Socket[bytes]", frames: HostileFrames, count: int, decode: Decoder, answered: Struct | None
) -> Flood:
    """Send at most `count` messages over a connection."""
    sent = Flood()
    valid, reads = frames.rng.random() < VALID, frames.rng.random() < 0.5
    if answered is not None:
        peer.send(encode(answered))
    while sent.sent < min(CONNECTION_FRAMES, count) and sent.malformed < MALFORMED_LIMIT - 1:
        message = [frames.draw_valid(decode, lambda _: False)] if valid else frames.draw()
        sent.sent += 1
        sent.size += sum(map(len, message))
        sent.malformed += is_malformed(message, decode)
        peer.send_multipart(message)
        while reads and peer.poll(0):
            peer.recv_multipart()
    if answered is not None:
        peer.send(encode(answered))
        peer.poll(1000)
    return sent


def knock(address: str, rng: Random, count: int) -> None:
    """Open `count` raw connections that send what libzmq would not, and keep the last few open."""
    kept: list[socket.socket] = []
    for _ in range(count):
        with suppress(OSError):  # the listener may end it at any time
            peer = _raw_connection(address)
            kept.append(peer)
            peer.sendall(rng.choice(RAW))
        if len(kept) > 20:
            kept.pop(0).close()
    for peer in kept:
        peer.close()


def _raw_connection(address: str) -> socket.socket:
    if address.startswith("ipc://"):
        peer = socket.socket(socket.AF_UNIX)
        try:
            peer.connect(address.removeprefix("ipc://"))
        except OSError:
            peer.close()
            raise
        return peer
    host, _, port = address.removeprefix("tcp://").rpartition(":")
    return socket.create_connection((host, int(port)))


def _greeting(mechanism: bytes, version: bytes = b"\x03\x00") -> bytes:
    return b"\xff" + bytes(8) + b"\x7f" + version + mechanism.ljust(20, b"\0") + bytes(32)


_READY = command(b"READY", b"\x0bSocket-Type\x00\x00\x00\x06DEALER\x08Identity\x00\x00\x00\x00")
_WRONG_PEER = command(b"READY", b"\x0bSocket-Type\x00\x00\x00\x03PUB\x08Identity\x00\x00\x00\x00")
RAW = (
    b"",
    b"GET / HTTP/1.1\r\n\r\n" * 50,
    bytes(1000),
    b"\xff" * 1000,
    _greeting(b"NULL")[:30],
    _greeting(b"PLAIN") + command(b"HELLO", b"\x05admin\x05admin"),
    _greeting(b"CURVE") + command(b"HELLO", bytes(194)),
    _greeting(b"GSSAPI"),
    _greeting(b"NULL", b"\x09\x09") + _READY,
    _greeting(b"NULL") + _WRONG_PEER,
    _greeting(b"NULL") + command(b"READY", b"\xffSocket-Type\xff\xff\xff\xff"),
    _greeting(b"NULL") + _READY + b"\x02" + (2**63 - 1).to_bytes(8, "big") + bytes(1000),  # claims to be 8 EiB long
    _greeting(b"NULL") + _READY + b"\x02" + (2**64 - 1).to_bytes(8, "big"),
    _greeting(b"NULL") + _READY + b"\x02" + (60 << 20).to_bytes(8, "big") + bytes(1000),  # never comes to its end
    _greeting(b"NULL") + _READY + b"\xf8" * 100,  # reserved flags
    _greeting(b"NULL") + _READY + command(b"PING", b"\x00\x0acontext") * 100,
    _greeting(b"NULL") + _READY + frame(b"", more=True) * 100,
)
"""What raw connections send: no ZMTP, another mechanism or version, another socket type, and false lengths."""


class HostileListener:
    """A listener to which honest peers connect, and which sends them hostile messages."""

    def __init__(self, listening: "zmq.Socket[bytes]", frames: HostileFrames, decode: Decoder) -> None:
        self._socket = listening
        self._frames = frames
        self._decode = decode

    def flood(self, count: int, excluded: Callable[[Any], bool]) -> Flood:
        """Send `count` messages. Each peer gets some that it decodes, but no `excluded` one, and then one that it
        does not decode.
        """
        result = Flood()
        while result.sent < count:
            peer = self._next_peer()
            messages = [[self._frames.draw_valid(self._decode, excluded)] for _ in range(CONNECTION_FRAMES - 1)]
            while not is_malformed(last := self._frames.draw(), self._decode) or last == [b""]:
                pass  # connecting peers ignore empty messages
            for message in [*messages, last]:
                self._socket.send_multipart([peer, *message])
                result.sent += 1
            result.malformed += 1
        return result

    @property
    def has_peer(self) -> bool:
        """Return whether something has come."""
        return bool(self._socket.poll(0))

    def _next_peer(self) -> bytes:
        """Return the identity of a peer that has just connected, and skip what others have sent before."""
        deadline = time.monotonic() + PATIENCE
        while time.monotonic() < deadline:
            peer, body = self._socket.recv_multipart()
            if msgspec.msgpack.decode(body)[0] == 1:  # `Hello` or `Register`, and no heartbeat
                return peer
        raise TimeoutError("no peer has connected")


@contextmanager
def hostile_listener(address: str, frames: HostileFrames, decode: Decoder) -> Iterator[HostileListener]:
    """Listen at an address for the time of the block."""
    with zmq.Context() as context, context.socket(zmq.ROUTER) as listening:
        listening.setsockopt(zmq.RCVTIMEO, int(PATIENCE * 1000))
        listening.setsockopt(zmq.LINGER, 0)
        listening.bind(address)
        yield HostileListener(listening, frames, decode)
