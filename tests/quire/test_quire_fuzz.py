"""Tests the supervisor's socket under a flood of hostile messages, while a server that it watches serves.

QUIRE_TEST_FRAMES sets their number, as in tests/system/test_system_fuzz.py.
"""

import os
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path

import psutil
import pytest

from quire.instance_folder import PREFIX
from shared.protocol import Heartbeat, ProcessStats, decode_to_supervisor
from tests.quire.quire_server import serving
from tests.quire.test_quire_serve import continuation
from tests.shared.wire_examples import FROM_GATEWAY, FROM_WORKER, TO_WORKER
from tests.system.hostile_frames import HostileFrames, flood, knock

COUNT = int(os.environ.get("QUIRE_TEST_FRAMES", "3000"))
MAX_GROWTH = 128 << 20
pytestmark = pytest.mark.timeout(300 + COUNT // 100)


def test_heartbeats_of_strangers_stop_no_service(folder: Path, tmp_path: Path) -> None:
    """They claim to be services that hang. The supervisor believes only the processes that it started."""
    hung = [Heartbeat(role, ProcessStats(9e8, 1e9)) for role in ("gateway", "scheduler", "worker")]
    frames = HostileFrames((COUNT, "supervisor"), hung, [*FROM_GATEWAY, *FROM_WORKER, *TO_WORKER])
    with ThreadPoolExecutor() as threads, serving(folder, tmp_path) as server, ExitStack() as peers:
        url = server.url
        undisturbed, services = continuation(url), server.children()
        before = server.process.memory_info().rss
        (path,) = server.place.glob(f"{PREFIX}.{server.process.pid}.*")
        address = f"ipc://{path}/heartbeats.sock"
        flooding = threads.submit(peers.enter_context, flood(address, frames, COUNT, decode_to_supervisor))
        knocking = threads.submit(knock, address, frames.rng, COUNT // 20)
        served = 0
        while not (flooding.done() and knocking.done()) or served < 20:
            assert continuation(url) == undisturbed
            served += 1
        assert flooding.result().sent == COUNT
        assert server.children() == services
        assert psutil.Process(server.process.pid).memory_info().rss - before < MAX_GROWTH
        assert 0 < server.err.read_text().count("dropped a message of process") < flooding.result().malformed / 3
