"""The command `quire bench`: picks a benchmark and parses its flags."""

import os
import sys
from collections.abc import Sequence

from quire.bench.options import LatencyOptions, ServeOptions, ThroughputOptions
from shared.config import flag_parser, resolve

USAGE = """\
usage: quire bench COMMAND [flags]

  serve        send requests to a server of the OpenAI API, and measure its answers
  throughput   run many prompts through the engine in this process
  latency      run one batch through the engine in this process many times

`quire bench COMMAND --help` lists the flags, which have the names of `vllm bench`.
"""

EXIT_WRONG = 2


def bench(argv: Sequence[str]) -> int:
    """Run the command; return the exit status. Raise `ConfigError` for wrong flags."""
    match list(argv):
        case ["serve", *rest]:
            return serve(rest)
        case ["throughput", *rest]:
            return throughput(rest)
        case ["latency", *rest]:
            return latency(rest)
        case ["help" | "--help" | "-h"]:
            print(USAGE, end="")
            return 0
        case [command, *_]:
            print(f"quire: there is no benchmark {command}\n", file=sys.stderr)
    print(USAGE, end="", file=sys.stderr)
    return EXIT_WRONG


def serve(argv: Sequence[str]) -> int:
    """Measure a server."""
    parser = flag_parser(
        [ServeOptions], prog="quire bench serve", description="Measure a server of the OpenAI API.", only_flags=True
    )
    options = resolve(ServeOptions, vars(parser.parse_args(argv)), {})
    from quire.bench.serve import run

    return run(options, os.environ)


def throughput(argv: Sequence[str]) -> int:
    """Measure the engine on many prompts."""
    from quire.bench.offline import engine_config, engine_settings
    from quire.bench.throughput import run

    parser = flag_parser(
        [ThroughputOptions, engine_config()],
        prog="quire bench throughput",
        description="Measure the throughput of many prompts.",
        only_flags=True,
    )
    flags = vars(parser.parse_args(argv))
    return run(resolve(ThroughputOptions, flags, {}), engine_settings(flags))


def latency(argv: Sequence[str]) -> int:
    """Measure the engine on one batch."""
    from quire.bench.latency import run
    from quire.bench.offline import engine_config, engine_settings

    parser = flag_parser(
        [LatencyOptions, engine_config()],
        prog="quire bench latency",
        description="Measure the latency of one batch. The prefix cache is off unless it is asked for.",
        only_flags=True,
    )
    flags = vars(parser.parse_args(argv))
    return run(resolve(LatencyOptions, flags, {}), engine_settings(flags))
