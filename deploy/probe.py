"""Health checks of the containers. Exit status 0 means healthy; 1 comes with a line that says what is wrong.

    probe.py http URL            the URL answers with status 200
    probe.py connected PORT      this container has a connection to that port of another container
    probe.py drain PORT          the service of this container, at its --admin-port, drains and has drained

The last is no check: it is for an orchestrator's hook before a container is stopped.

A worker does not listen. It connects to its scheduler once its model is loaded, and keeps that connection. Whether it
then works is for the scheduler to judge, which gets the result of every step.
"""

import sys
import urllib.error
import urllib.request
from collections.abc import Iterable, Sequence
from pathlib import Path

TIMEOUT = 3.0  # seconds

TABLES = (Path("/proc/net/tcp"), Path("/proc/net/tcp6"))
REMOTE, STATE = 2, 3  # columns of the tables
ESTABLISHED = "01"


def main(argv: Sequence[str]) -> int:
    """Return the exit status."""
    match argv:
        case ["http", url]:
            error = ask(url)
        case ["connected", port] if port.isdecimal():
            tables = [table.read_text() for table in TABLES if table.exists()]
            error = "" if connected(int(port), tables) else f"there is no connection to port {port}"
        case ["drain", port] if port.isdecimal():
            error = ask(urllib.request.Request(f"http://127.0.0.1:{port}/drain", method="POST"), timeout=None)
        case _:
            error = "usage: probe.py http URL | connected PORT | drain PORT"
    print(error or "well")  # the container engine keeps it with the container's health
    return 1 if error else 0


def ask(url: str | urllib.request.Request, timeout: float | None = TIMEOUT) -> str:
    """Return what is wrong with the answer at `url`; empty if it is well."""
    try:
        with urllib.request.urlopen(url, timeout=timeout) as response:
            return "" if response.status == 200 else f"status {response.status}"
    except urllib.error.HTTPError as error:
        with error:
            return f"status {error.code}: {error.read(500).decode(errors='replace')}"
    except OSError as error:
        return str(error)


def connected(port: int, tables: Iterable[str]) -> bool:
    """Return whether the kernel's tables have an established connection to `port` of another end."""
    rows = [line.split() for table in tables for line in table.splitlines()[1:]]
    return any(row[STATE] == ESTABLISHED and int(row[REMOTE].rpartition(":")[2], 16) == port for row in rows)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
