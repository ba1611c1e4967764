"""Answers which CURVE keys a scheduler's sockets admit.

libzmq asks by ZAP (https://rfc.zeromq.org/spec/27) over a socket inside the process, and a thread answers. It is not
pyzmq's `ThreadAuthenticator`: that one takes half a millisecond of Python for each question, in which the scheduler's
loop stands still, so that a stranger who tries again and again slows every step down. For the same reason a refusal is
held back for `REFUSAL_DELAY`: whoever waits for it costs nothing meanwhile.
"""

import signal
import time
from collections import deque
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from threading import Thread
from typing import Any

import zmq
from zmq.utils import z85

from shared.curve import ListenerKeys

ADDRESS = "inproc://zeromq.zap.01"
VERSION = b"1.0"

REFUSAL_DELAY = 1.0
"""Seconds until a stranger is told that its key is not admitted."""

MAX_HELD = 64
"""Refusals that are held back at a time, since each keeps a connection open. The oldest goes when one more comes."""

_STOP = b"stop"  # in place of a question, from `authentication` itself


@contextmanager
def authentication(context: "zmq.Context[Any]", keys: ListenerKeys | None) -> Iterator[None]:
    """Let the listeners of `context` that have keys ask whom they admit, for the time of the block.

    It must begin before they are bound.
    """
    if keys is None:
        yield
        return
    admitted = {role.encode(): frozenset(map(z85.decode, public)) for role, public in keys.admitted.items()}
    with context.socket(zmq.ROUTER) as questions, context.socket(zmq.DEALER) as stop:
        questions.bind(ADDRESS)
        stop.connect(ADDRESS)
        thread = Thread(target=_Authenticator(questions, admitted).run, name="authentication", daemon=True)
        mask = signal.pthread_sigmask(signal.SIG_BLOCK, signal.valid_signals())  # signals must wake the loop's poll
        try:
            thread.start()  # it inherits the mask
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, mask)
        try:
            yield
        finally:
            stop.send(_STOP)
            thread.join()


class _Authenticator:
    """Answers the questions of libzmq; `admitted` has the public keys, of 32 bytes, by role."""

    def __init__(self, questions: "zmq.Socket[bytes]", admitted: Mapping[bytes, frozenset[bytes]]) -> None:
        self._questions = questions
        self._admitted = admitted
        self._held: deque[tuple[float, list[bytes]]] = deque()  # refusals, and when to send them

    def run(self) -> None:
        """Answer until told to stop."""
        while True:
            due = self._held[0][0] - time.monotonic() if self._held else None
            if self._questions.poll(None if due is None else max(int(due * 1000) + 1, 0)):
                frames = self._questions.recv_multipart()
                if frames[-1] == _STOP:
                    return
                self._answer(frames)
            while self._held and (len(self._held) > MAX_HELD or time.monotonic() >= self._held[0][0]):
                self._questions.send_multipart(self._held.popleft()[1])

    def _answer(self, frames: list[bytes]) -> None:
        sender, _, _, request, domain, _, _, mechanism, *credentials = frames
        head = [sender, b"", VERSION, request]
        if mechanism == b"CURVE" and credentials[0] in self._admitted.get(domain, ()):
            self._questions.send_multipart([*head, b"200", b"OK", b"", b""])
        else:
            self._held.append((time.monotonic() + REFUSAL_DELAY, [*head, b"400", b"unknown key", b"", b""]))
