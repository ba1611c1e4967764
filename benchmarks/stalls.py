"""Measures for how long one client's body keeps a gateway's loop from all others.

    python -m benchmarks.stalls [--size MIB] [--context TOKENS] [--at-once N] [--only TEXT]

The gateway's application listens on loopback, in front of an engine that answers at once. Threads send the bodies of
`tests/gateway/large_bodies.py`, as long as the gateway takes them, while a task on the gateway's loop wakes every two
milliseconds and notes the longest delay, less the time for which others had the CPU. Prints the statuses and the
longest stall in milliseconds: of the best of some rounds (what the body costs), and of the worst.
"""

import argparse
import gc
import sys
from collections.abc import Sequence

import uvloop

from services.gateway.bounds import MIB
from tests.gateway.fakes import FakeBackend, serve
from tests.gateway.large_bodies import bodies, stall

ROUNDS = 3


async def measure(options: argparse.Namespace) -> None:
    """Print a line for each shape, the worst last."""
    rows: list[tuple[float, float, str]] = []
    async with serve(FakeBackend(max_model_len=options.context), max_body_size=options.size) as client:
        size, port = client.gateway.max_body_size, client.port
        assert port is not None
        gc.collect()
        gc.freeze()  # as a gateway does
        print(f"{size / MIB:.2f} MiB a body, {options.at_once} at once, {ROUNDS} rounds")
        for name, path, body in bodies(size):
            if options.only not in name:
                continue
            rounds = [await stall(port, path, [body] * options.at_once) for _ in range(ROUNDS)]
            stalls = [1000 * longest for longest, _, _ in rounds]
            rows.append((min(stalls), max(stalls), f"{name} {sorted(set(rounds[0][1]))}"))
    for best, worst, name in sorted(rows):
        print(f"{best:7.1f} {worst:7.1f}  {name}")


def main(argv: Sequence[str]) -> None:
    """Parse the arguments."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--size", type=int, help="MiB; as the context asks for, if unset")
    parser.add_argument("--context", type=int, default=8192)
    parser.add_argument("--at-once", type=int, default=1)
    parser.add_argument("--only", default="", help="shapes whose names have this text")
    uvloop.run(measure(parser.parse_args(argv)))


if __name__ == "__main__":
    main(sys.argv[1:])
