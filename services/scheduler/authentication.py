"""Answers which CURVE keys a scheduler's sockets admit."""

import signal
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import zmq
from zmq.auth.thread import ThreadAuthenticator

from shared.curve import ListenerKeys


@contextmanager
def authentication(context: "zmq.Context[Any]", keys: ListenerKeys | None) -> Iterator[None]:
    """Let the listeners of `context` that have keys ask whom they admit, for the time of the block.

    It must begin before they are bound. libzmq asks over a socket of its own, and a thread answers.
    """
    if keys is None:
        yield
        return
    authenticator = ThreadAuthenticator(context)
    for role, admitted in keys.admitted.items():
        authenticator.configure_curve_callback(role, _Admission(admitted))
    mask = signal.pthread_sigmask(signal.SIG_BLOCK, signal.valid_signals())  # signals must wake the loop's poll instead
    try:
        authenticator.start()  # the thread inherits the mask
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, mask)
    try:
        yield
    finally:
        authenticator.stop()


class _Admission:
    """Answers for one role, in the form that `zmq.auth` asks for."""

    def __init__(self, admitted: frozenset[bytes]) -> None:
        self._admitted = admitted

    def callback(self, domain: str, key: bytes) -> bool:
        """Return whether a public key is admitted."""
        return key in self._admitted
