"""`Watch`: judges by their own signs whether the services live. It names those to replace, and kills nothing itself.

A service is judged from its first beat on, since loading a model may take any time. Its limits are longer than those of
its peers: a scheduler judges its worker, and a gateway its scheduler, first.
"""

from collections.abc import Mapping, Sequence
from typing import NamedTuple

from msgspec import Struct

from quire.children import Child
from shared.cpu_usage import Process
from shared.errors import ProtocolError
from shared.liveness import STALL, Liveness
from shared.protocol import Heartbeat, decode_to_supervisor
from shared.transport import Listener

PERIOD = 0.25
"""Seconds between two looks."""

BEATS = 100
"""Beats that are read in one look: a few from each service are due."""


class Patience(NamedTuple):
    """The seconds for which one service may be silent, and stay in one turn of its loop."""

    silence: float
    turn: float | None  # None: a peer knows better how long its turns may take


class Life(Struct):
    """The signs of life of one process of a service."""

    pid: int
    process: Process
    liveness: Liveness


class Watch:
    """The signs of life of services, by their names. Time is a parameter."""

    def __init__(self, listener: Listener, patience: Mapping[str, Patience]) -> None:
        self._listener = listener
        self._patience = patience
        self._lives: dict[str, Life] = {}
        self._looked: float | None = None

    def look(self, children: Sequence[Child], now: float) -> list[tuple[Child, str]]:
        """Return those that are dead, and why. Call it every `PERIOD`."""
        pids = {child.name: child.process.pid for child in children if child.process is not None and child.wanted}
        self._lives = {name: life for name, life in self._lives.items() if pids.get(name) == life.pid}
        self._forgive(now)
        self._read(pids, now)
        faults = [(child, self._judge(life, now)) for child in children if (life := self._lives.get(child.name))]
        return [(child, fault) for child, fault in faults if fault]

    def _read(self, pids: Mapping[str, int], now: float) -> None:
        for _ in range(BEATS):
            if (message := self._listener.receive()) is None:
                return
            try:
                beat = decode_to_supervisor(message.body)
            except ProtocolError:
                continue
            if message.pid is not None and message.pid == pids.get(beat.identity):  # and not a former process's
                self._note_beat(beat, message.pid, now)

    def _note_beat(self, beat: Heartbeat, pid: int, now: float) -> None:
        life = self._lives.get(beat.identity)
        if life is None:
            patience = self._patience[beat.identity]
            liveness = Liveness(patience.silence, now, turn_timeout=patience.turn, local=True)
            life = self._lives[beat.identity] = Life(pid, Process(pid), liveness)
        life.liveness.note_heartbeat(beat.process, now)

    def _judge(self, life: Life, now: float) -> str:
        if life.liveness.should_observe(now):
            life.liveness.observe(life.process.cpu_usage(), now)
        return life.liveness.failure(now)

    def _forgive(self, now: float) -> None:
        still = 0.0 if self._looked is None else now - self._looked
        self._looked = now
        if still > PERIOD + STALL:
            for life in self._lives.values():
                life.liveness.forgive(still)
