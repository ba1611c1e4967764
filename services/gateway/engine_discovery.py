"""Finds the addresses of a gateway's engines, which may change at run time.

An entry of `--engines` is one address (`tcp://...`, `ipc://...`), a DNS name that stands for many
(`dns://NAME:PORT`), or a file with one address a line (`file:///PATH`). `Discovery.find` looks at names and files anew.
A look that fails (no answer of the DNS, no such file, a line that is no address) changes nothing: an engine that works
is worth more than a list that says so. An empty file is such a failure, since a file is empty while it is written anew.
One that is to name no engine has a comment.
"""

import asyncio
import ipaddress
import logging
import socket
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import NamedTuple

from shared.errors import ConfigError
from shared.transport import check_address, check_exposure

logger = logging.getLogger(__name__)

DISCOVERY_INTERVAL = 2.0
"""Seconds between two looks at names and files."""


class Changes(NamedTuple):
    """What a new list of addresses adds to the present one, and what it lacks."""

    added: list[str]
    removed: list[str]


def changes(present: Iterable[str], found: Iterable[str]) -> Changes:
    """Return the addresses to connect and those to leave, each once and in the order of its list."""
    present, found = dict.fromkeys(present), dict.fromkeys(found)
    return Changes([one for one in found if one not in present], [one for one in present if one not in found])


class Discovery:
    """The entries of `--engines`, and what was last found for each.

    Raise `ConfigError` for an invalid entry, and for one on another host unless connections are `protected`.
    """

    def __init__(self, entries: Sequence[str], *, protected: bool = True) -> None:
        self._protected = protected
        self._found: dict[str, list[str]] = {}
        self._failures: dict[str, str] = {}  # of the last look, by entry
        for entry in entries:
            self._found[entry] = [] if _may_change(entry) else [entry]
            if not entry.startswith("file://"):
                check_exposure(entry.replace("dns://", "tcp://", 1), protected=protected)
        self.may_change = any(_may_change(entry) for entry in entries)

    @property
    def addresses(self) -> list[str]:
        """Return the addresses that were last found, each once."""
        return list(dict.fromkeys(address for addresses in self._found.values() for address in addresses))

    async def find(self) -> list[str]:
        """Look at names and files anew, and return all addresses."""
        for entry in filter(_may_change, self._found):
            try:
                found = await _find(entry)
                for address in found:
                    check_exposure(address, protected=self._protected)
                self._found[entry] = found
            except (OSError, ValueError, ConfigError) as error:
                self._note(entry, str(error))
            else:
                self._note(entry, "")
        return self.addresses

    def _note(self, entry: str, failure: str) -> None:
        """Log a failure when it begins and when it is over."""
        if failure != self._failures.get(entry, ""):
            self._failures[entry] = failure
            if failure:
                logger.warning("%s: %s; its %d known engines stay", entry, failure, len(self._found[entry]))
            else:
                logger.info("%s can be read again", entry)


def _may_change(entry: str) -> bool:
    """Return whether an entry is a name or a file. Raise `ConfigError` for an invalid one."""
    if entry.startswith("dns://"):
        host, _, port = entry.removeprefix("dns://").rpartition(":")
        if not host or not port.isdecimal() or not 0 < int(port) < 65536:
            raise ConfigError(f"{entry}: must be dns://name:port")
        return True
    if entry.startswith("file://"):
        if not entry.startswith("file:///"):
            raise ConfigError(f"{entry}: must be file:// and an absolute path")
        return True
    if not entry.startswith(("ipc://", "tcp://")):
        raise ConfigError(f"{entry}: must begin with ipc://, tcp://, dns:// or file://")
    check_address(entry)
    return False


async def _find(entry: str) -> list[str]:
    if entry.startswith("file://"):
        text = await asyncio.to_thread(Path(entry.removeprefix("file://")).read_text, encoding="utf-8")
        return parse_lines(text)
    name, _, port = entry.removeprefix("dns://").rpartition(":")
    answers = await asyncio.get_running_loop().getaddrinfo(name.strip("[]"), int(port), type=socket.SOCK_STREAM)
    return tcp_addresses([str(answer[4][0]) for answer in answers], int(port))


def parse_lines(text: str) -> list[str]:
    """Return the addresses in a file: one a line, without empty lines and comments (`#`).

    Raise `ConfigError` for an invalid one, and if the file is empty.
    """
    if not text:
        raise ConfigError("the file is empty")
    lines = (line.partition("#")[0].strip() for line in text.splitlines())
    addresses = [line for line in lines if line]
    for address in addresses:
        check_address(address)
    return addresses


def tcp_addresses(hosts: Iterable[str], port: int) -> list[str]:
    """Return the addresses of engines at `hosts` (IP addresses), in an order that does not depend on the DNS.

    IPv6 counts only if there is no IPv4: a name with both has each engine twice.
    """
    parsed = sorted({ipaddress.ip_address(host) for host in hosts}, key=lambda host: (host.version, int(host)))
    version = parsed[0].version if parsed else 4
    texts = [f"[{host}]" if host.version == 6 else str(host) for host in parsed if host.version == version]
    return [f"tcp://{text}:{port}" for text in texts]
