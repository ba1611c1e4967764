"""Tests the socket to which an `LLM`'s other ranks connect, with a peer that is none of its processes."""

from contextlib import closing

import pytest
import zmq

from quire.rank_processes import RankProcesses
from shared.errors import EngineFailure
from shared.protocol import VERSION, Configured, Epoch, Fault, ModelInfo, Register, WorkerToScheduler, encode
from tests.quire.quire_server import short_folder

EPOCH = Epoch("test", 1)
MODEL = ModelInfo("m", "Llama", "float32", 1000, 100, "f")
REGISTER = Register(VERSION, "worker", 1, 2, 77, "cpu", MODEL, 10, 8000, 0.01, 0.001)


def answers(processes: RankProcesses, count: int) -> list[tuple[int, WorkerToScheduler]]:
    """Wait for so many answers, and return them."""
    received: list[tuple[int, WorkerToScheduler]] = []
    while len(received) < count:
        processes.wait()
        received += processes.receive()
    return received


def test_only_those_that_have_registered_are_ranks() -> None:
    """What others say is dropped. A rank that says what is no message ends the group."""
    with (
        short_folder() as folder,
        closing(RankProcesses([], [], folder)) as processes,
        zmq.Context() as context,
        context.socket(zmq.DEALER) as peer,
    ):
        peer.linger = 0
        peer.connect(f"ipc://{folder}/ranks.sock")
        for body in (encode(Fault(EPOCH, 0, "lost")), encode(Configured(EPOCH)), b"no message"):
            peer.send(body)
        for message in (REGISTER, Configured(EPOCH)):
            peer.send(encode(message))
        assert answers(processes, 2) == [(1, REGISTER), (1, Configured(EPOCH))]
        peer.send(b"no message")
        with pytest.raises(EngineFailure, match=r"^rank 1 sent an invalid message: "):
            answers(processes, 1)
