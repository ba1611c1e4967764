"""Health checks of the containers: exit status 0 if all is well, else 1 and a line that says what is not.

    probe.py http URL            the URL is answered with status 200
    probe.py connected PORT      a connection of this container to that port of another one stands

A worker listens on nothing; it dials its scheduler once its model is loaded, and keeps that connection. Whether it
then computes is the scheduler's to judge, which hears of every step.
"""

import sys
import urllib.error
import urllib.request
from collections.abc import Iterable, Sequence
from pathlib import Path

TIMEOUT = 3.0  # seconds

TABLES = (Path("/proc/net/tcp"), Path("/proc/net/tcp6"))
REMOTE, STATE = 2, 3  # columns of them
ESTABLISHED = "01"


def main(argv: Sequence[str]) -> int:
    """The exit status."""
    match argv:
        case ["http", url]:
            wrong = ask(url)
        case ["connected", port] if port.isdecimal():
            tables = [table.read_text() for table in TABLES if table.exists()]
            wrong = "" if connected(int(port), tables) else f"there is no connection to port {port}"
        case _:
            wrong = "usage: probe.py http URL | connected PORT"
    print(wrong or "well")  # the engine keeps it with the container's health
    return 1 if wrong else 0


def ask(url: str) -> str:
    """What is wrong with what answers at `url`; empty if nothing is."""
    try:
        with urllib.request.urlopen(url, timeout=TIMEOUT) as response:
            return "" if response.status == 200 else f"status {response.status}"
    except urllib.error.HTTPError as error:
        with error:
            return f"status {error.code}: {error.read(500).decode(errors='replace')}"
    except OSError as error:
        return str(error)


def connected(port: int, tables: Iterable[str]) -> bool:
    """Whether one of the kernel's tables of connections has an established one to `port` of another end."""
    rows = [line.split() for table in tables for line in table.splitlines()[1:]]
    return any(row[STATE] == ESTABLISHED and int(row[REMOTE].rpartition(":")[2], 16) == port for row in rows)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
