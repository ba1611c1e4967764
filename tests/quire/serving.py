"""A running `quire serve` for tests: real processes, whose sockets and output lie in a folder of the test."""

import os
import re
import signal
import sys
import time
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from urllib.error import HTTPError

import psutil

ROOT = Path(__file__).parents[2]
GONE_WITHIN = 10.0  # seconds after a signal


class Server:
    """A running `quire serve`, its output in files of `folder`."""

    def __init__(self, model: Path, folder: Path, *flags: str, name: str = "tiny") -> None:
        self.place = folder / "run"
        self.place.mkdir(exist_ok=True)
        self.out, self.err = folder / "out", folder / "err"
        environment = {
            **os.environ,
            "PYTHONPATH": str(ROOT),
            "XDG_RUNTIME_DIR": str(self.place),
            "OMP_NUM_THREADS": "1",
        }
        argv = [sys.executable, "-m", "quire", "serve", str(model), "--host=127.0.0.1", "--port=0"]
        argv += ["--kv-cache-memory=0.05", "--num-threads=1", f"--served-model-name={name}", *flags]
        with self.out.open("w") as out, self.err.open("w") as err:
            self.process = psutil.Popen(argv, stdout=out, stderr=err, env=environment)

    @property
    def url(self) -> str:
        """Once it is announced."""
        deadline = time.monotonic() + 90
        while not (found := re.search(r"at (http://\S+) \(ready", self.out.read_text())):
            assert self.process.poll() is None, self.err.read_text()
            assert time.monotonic() < deadline, self.err.read_text()
            time.sleep(0.05)
        return found[1]

    def children(self) -> dict[str, psutil.Process]:
        """Services by name."""
        found = {}
        for child in self.process.children():
            with suppress(psutil.Error):  # it has just ended
                argv = child.cmdline()
                found |= {name: child for name in ("gateway", "scheduler", "worker") if f"services.{name}" in argv}
        return found

    def stop(self, number: signal.Signals) -> int:
        """Send a signal; the exit status. Everything must be gone in time, files included."""
        family = [self.process, *self.process.children(recursive=True)]
        self.process.send_signal(number)
        _, alive = psutil.wait_procs(family, timeout=GONE_WITHIN)
        assert alive == [], self.err.read_text()
        assert list(self.place.iterdir()) == []
        return int(self.process.returncode)


@contextmanager
def serving(model: Path, folder: Path, *flags: str, name: str = "tiny") -> Iterator[Server]:
    """A server for the time of the block."""
    server = Server(model, folder, *flags, name=name)
    try:
        yield server
    finally:
        if server.process.is_running():
            server.process.kill()  # its children follow
            server.process.wait()


def health(url: str) -> int | None:
    """Status of `GET /health`; None if nobody answers."""
    try:
        with urllib.request.urlopen(f"{url}/health", timeout=5) as response:
            return int(response.status)
    except HTTPError as error:
        with error:  # it holds a connection
            return int(error.code)
    except OSError:
        return None


def healthy(url: str) -> bool:
    return health(url) == 200
