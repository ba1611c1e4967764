"""`Tally`: what all clients of a soak saw."""

from typing import NamedTuple

from msgspec import Struct


class Pause(NamedTuple):
    """A time in which a stream that had begun, and whose client was reading, brought nothing; monotonic seconds."""

    began: float
    ended: float


class Tally(Struct):
    """What all clients saw."""

    tokens: int = 0  # of streams that ended as they should
    ended: int = 0
    left: int = 0
    came_back: int = 0
    stalled: int = 0
    broken: int = 0  # connections to a gateway that was killed
    refused: int = 0  # because the queue was full
    lost: list[str] = []
    pauses: list[Pause] = []
