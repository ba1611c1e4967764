"""Free TCP ports for servers under test."""

import random
import socket
from contextlib import ExitStack, suppress
from pathlib import Path

_RANGE = Path("/proc/sys/net/ipv4/ip_local_port_range")
_held: list[socket.socket] = []  # for as long as this process lives


def free_ports(count: int) -> list[int]:
    """Return `count` different ports of 127.0.0.1 that are free now, and that no other process of tests will choose.

    A server binds its port later. So none is among those that the system gives to connections of clients, of which
    tests make thousands. Where there are no others, or no names to hold, any free port must do.
    """
    first, last = _ephemeral()
    candidates = [port for port in range(10_000, 65_536) if not first <= port <= last]
    random.SystemRandom().shuffle(candidates)
    ports: list[int] = []
    for port in candidates:
        if len(ports) == count:
            return ports
        if _is_free(port) and _hold(port):
            ports.append(port)
    return ports + _any_free(count - len(ports))


def _ephemeral() -> tuple[int, int]:
    with suppress(OSError):
        first, last = map(int, _RANGE.read_text().split())
        return first, last
    return 32_768, 65_535


def _is_free(port: int) -> bool:
    with socket.socket() as probe:
        try:
            probe.bind(("127.0.0.1", port))
        except OSError:
            return False
    return True


def _hold(port: int) -> bool:
    """Take a name for the port, which the kernel gives to one process only, and until it ends."""
    name = socket.socket(socket.AF_UNIX)
    try:
        name.bind(f"\0quire-test-port-{port}")
    except OSError:
        name.close()
        return False
    _held.append(name)
    return True


def _any_free(count: int) -> list[int]:
    with ExitStack() as stack:
        probes = [stack.enter_context(socket.socket()) for _ in range(count)]
        for probe in probes:
            probe.bind(("127.0.0.1", 0))
        return [int(probe.getsockname()[1]) for probe in probes]
