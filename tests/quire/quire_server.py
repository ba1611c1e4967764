"""Runs `quire serve` for tests, with its output in a folder of the test.

Its sockets are in a folder with a short path, since the server skips a path that is too long for sockets.
"""

import os
import re
import signal
import sys
import tempfile
import urllib.request
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from urllib.error import HTTPError

import psutil

from quire.instance_folder import PREFIX
from tests.ports import free_ports
from tests.waiting import PATIENCE, wait_until

ROOT = Path(__file__).parents[2]


class Server:
    """A running `quire serve`, its output in files of `folder`, its sockets in a folder of `place`.

    `variables` are added to its environment.
    """

    def __init__(
        self, model: Path, folder: Path, *flags: str, name: str, place: Path, variables: Mapping[str, str]
    ) -> None:
        folder.mkdir(exist_ok=True)
        self.place = place
        self.out, self.err = folder / "out", folder / "err"
        environment = {
            **os.environ,
            "PYTHONPATH": str(ROOT),
            "XDG_RUNTIME_DIR": str(self.place),
            "OMP_NUM_THREADS": "1",
            **variables,
        }
        argv = [sys.executable, "-m", "quire", "serve", str(model), "--host=127.0.0.1", f"--port={free_ports(1)[0]}"]
        argv += ["--kv-cache-memory=0.05", "--num-threads=1", f"--served-model-name={name}", *flags]
        with self.out.open("w") as out, self.err.open("w") as err:
            self.process = psutil.Popen(argv, stdout=out, stderr=err, env=environment)

    @property
    def url(self) -> str:
        """Wait until the server announces its address, and return it."""
        announced = re.compile(r"at (http://\S+) \(ready")

        def is_announced() -> bool:
            assert self.process.poll() is None, self.err.read_text()
            return announced.search(self.out.read_text()) is not None

        wait_until(is_announced, 2 * PATIENCE, self.err.read_text)
        return announced.findall(self.out.read_text())[0]

    def children(self) -> dict[str, psutil.Process]:
        """Return the processes of the services by name."""
        result: dict[str, psutil.Process] = {}
        for child in self.process.children():
            with suppress(psutil.Error):  # the process has just ended
                argv = child.cmdline()
                result |= {name: child for name in ("gateway", "scheduler", "worker") if f"services.{name}" in argv}
        return result

    def all_children(self) -> dict[str, psutil.Process]:
        """Return the processes of all services, where there are several of a kind, by name and number."""
        result: dict[str, psutil.Process] = {}
        for child in self.process.children():
            with suppress(psutil.Error):  # the process has just ended
                argv = " ".join(child.cmdline())
                for role, socket in (("gateway", "http"), ("scheduler", "workers"), ("worker", "workers")):
                    if f" services.{role} " in argv and (number := re.search(rf"/{socket}-(\d+)\.sock", argv)):
                        result[f"{role} {number[1]}"] = child
        return result

    def ranks(self) -> list[psutil.Process]:
        """Return the processes of the ranks of one engine, in order."""
        result: dict[int, psutil.Process] = {}
        for child in self.process.children():
            with suppress(psutil.Error):  # the process has just ended
                argv = " ".join(child.cmdline())
                if " services.worker " in argv:
                    found = re.search(r"--rank=(\d+)", argv)
                    result[int(found[1]) if found else 0] = child
        return [result[rank] for rank in sorted(result)]

    def files(self) -> set[str]:
        """Return the names of the files in the server's own folder, if that exists."""
        return {path.name for folder in self.place.glob(f"{PREFIX}.{self.process.pid}.*") for path in folder.iterdir()}

    def stop(self, number: signal.Signals) -> int:
        """Send a signal and return the exit status. Fail unless all processes and files are gone in time."""
        status = self.end(number)
        assert list(self.place.glob(f"{PREFIX}.{self.process.pid}.*")) == []
        return status

    def end(self, number: signal.Signals, *, whole_family: bool = False) -> int:
        """Send a signal to the supervisor or the `whole_family`; return the exit status. Fail if a process stays."""
        family = [self.process, *self.process.children(recursive=True)]
        for process in family if whole_family else family[:1]:
            with suppress(psutil.NoSuchProcess):  # the services end with their supervisor
                process.send_signal(number)
        _, alive = psutil.wait_procs(family, timeout=PATIENCE)
        assert alive == [], self.err.read_text()
        return int(self.process.returncode)


@contextmanager
def serving(
    model: Path,
    folder: Path,
    *flags: str,
    name: str = "tiny",
    place: Path | None = None,
    variables: Mapping[str, str] | None = None,
) -> Iterator[Server]:
    """Run a server for the time of the block, with its sockets in `place` or else in a folder of its own."""
    with ExitStack() as stack:
        place = place or stack.enter_context(short_folder())
        server = Server(model, folder, *flags, name=name, place=place, variables=variables or {})
        try:
            yield server
        finally:
            if server.process.is_running():
                server.process.kill()  # its children end with it
                server.process.wait()


@contextmanager
def short_folder() -> Iterator[Path]:
    """Yield a temporary folder whose path is short enough for sockets."""
    with tempfile.TemporaryDirectory(prefix="q", dir="/tmp") as folder:
        yield Path(folder)


def health(url: str, num_engines: int = 1) -> int | None:
    """Return the status of `GET /health` for so many engines, or None if nobody answers."""
    try:
        with urllib.request.urlopen(f"{url}/health?engines={num_engines}", timeout=PATIENCE) as response:
            return int(response.status)
    except HTTPError as error:
        with error:  # it holds a connection
            return int(error.code)
    except OSError:
        return None


def healthy(url: str) -> bool:
    return health(url) == 200
