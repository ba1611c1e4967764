"""The command `quire bench`: picks a benchmark and parses its flags."""

import os
import sys
from collections.abc import Sequence

from quire.bench.options import LatencyOptions, ServeOptions, ThroughputOptions
from shared.config import flag_parser, resolve

USAGE = """\
usage: quire bench COMMAND [flags]

  serve        send requests to an OpenAI-compatible server, and measure its responses
  throughput   run many prompts through the engine in this process
  latency      run one batch through the engine in this process many times

`quire bench COMMAND --help` lists the flags, which have the names of `vllm bench`.
"""

EXIT_WRONG_USAGE = 2


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
    return EXIT_WRONG_USAGE


def serve(argv: Sequence[str]) -> int:
    """Run `quire bench serve`; return the exit status."""
    parser = flag_parser(
        [ServeOptions], prog="quire bench serve", description="Measure an OpenAI-compatible server.", only_flags=True
    )
    options = resolve(ServeOptions, vars(parser.parse_args(argv)), environment={})
    from quire.bench.serve import run

    return run(options, os.environ)


def throughput(argv: Sequence[str]) -> int:
    """Run `quire bench throughput`; return the exit status."""
    from quire.bench.offline import engine_config, engine_settings
    from quire.bench.throughput import run

    parser = flag_parser(
        [ThroughputOptions, engine_config()],
        prog="quire bench throughput",
        description="Measure the throughput of many prompts.",
        only_flags=True,
    )
    flags = vars(parser.parse_args(argv))
    return run(resolve(ThroughputOptions, flags, environment={}), engine_settings(flags))


def latency(argv: Sequence[str]) -> int:
    """Run `quire bench latency`; return the exit status."""
    from quire.bench.latency import run
    from quire.bench.offline import engine_config, engine_settings

    parser = flag_parser(
        [LatencyOptions, engine_config()],
        prog="quire bench latency",
        description="Measure the latency of one batch. The prefix cache is off unless --enable-prefix-caching is set.",
        only_flags=True,
    )
    flags = vars(parser.parse_args(argv))
    return run(resolve(LatencyOptions, flags, environment={}), engine_settings(flags))
