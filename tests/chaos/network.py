"""Network namespaces with links that can be cut, for one machine and root.

A namespace lasts as long as a process that waits for the end of its input, so that none is left when the test is
killed. A link is a pair of virtual devices. One that is cut loses packets in both directions, and tells nobody.
"""

import asyncio
import os
import shutil
from asyncio.subprocess import DEVNULL, PIPE, Process
from collections.abc import Sequence
from pathlib import Path

from tests.waiting import until

PROGRAMS = ("unshare", "nsenter", "ip")


async def obstacle() -> str:
    """Return why there can be no namespaces here; empty if there can."""
    if os.geteuid() != 0:
        return "network namespaces need root"
    if absent := [program for program in PROGRAMS if shutil.which(program) is None]:
        return f"network namespaces need {', '.join(absent)}"
    probe = await asyncio.create_subprocess_exec(
        *("unshare", "--net", "ip", "link", "add", "probe0", "type", "veth", "peer", "name", "probe1"),
        stdout=PIPE,
        stderr=PIPE,
    )
    _, error = await probe.communicate()
    return f"network namespaces do not work here: {error.decode().strip()}" if probe.returncode else ""


class Namespace:
    """A network namespace."""

    def __init__(self) -> None:
        self._holder: Process | None = None

    async def open(self) -> None:
        self._holder = await asyncio.create_subprocess_exec("unshare", "--net", "cat", stdin=PIPE, stdout=DEVNULL)
        await until(lambda: os.readlink(self._path) != os.readlink("/proc/self/ns/net"))
        await self.run("ip", "link", "set", "lo", "up")

    async def close(self) -> None:
        """End the namespace's holder. The namespace ends with the last process in it."""
        if self._holder is not None and self._holder.stdin is not None:
            self._holder.stdin.close()
            await self._holder.wait()

    @property
    def pid(self) -> int:
        assert self._holder is not None
        return self._holder.pid

    @property
    def entrance(self) -> Sequence[str]:
        """The words before a command that shall run in this namespace."""
        return ("nsenter", f"--net={self._path}")

    async def run(self, *command: str) -> None:
        """Run a command here. Raise OSError if it fails."""
        process = await asyncio.create_subprocess_exec(*self.entrance, *command, stderr=PIPE)
        _, error = await process.communicate()
        if process.returncode:
            raise OSError(f"{' '.join(command)}: {error.decode().strip()}")

    @property
    def _path(self) -> Path:
        return Path(f"/proc/{self.pid}/ns/net")


class Link:
    """A link between two namespaces. `name` is that of its device in both, and `network` the first three numbers of its
    addresses: `near` has the last number 1, and `far` 2.
    """

    def __init__(self, near: Namespace, far: Namespace, name: str, network: str) -> None:
        self._near, self._far, self._name = near, far, name
        self._network = network

    @property
    def near_address(self) -> str:
        return f"{self._network}.1"

    @property
    def far_address(self) -> str:
        return f"{self._network}.2"

    async def open(self) -> None:
        peer = ("peer", "name", self._name, "netns", str(self._far.pid))
        await self._near.run("ip", "link", "add", self._name, "type", "veth", *peer)
        for end, address in ((self._near, self.near_address), (self._far, self.far_address)):
            await end.run("ip", "address", "add", f"{address}/24", "dev", self._name)
            await end.run("ip", "link", "set", self._name, "up")

    async def cut(self) -> None:
        """Lose all packets from now on. The near end sees its device without a carrier, and sends into the void."""
        await self._far.run("ip", "link", "set", self._name, "down")

    async def heal(self) -> None:
        """Carry packets again."""
        await self._far.run("ip", "link", "set", self._name, "up")
