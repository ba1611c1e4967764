"""The command `quire`: `serve`, `pull`, `models`, `bench`, `keys`, `replay`, `knobs`, `version`.

An error that the user can correct is one line on stderr and a non-zero exit status. Each command imports what it needs,
so that `--help` is quick and Ctrl-C works at once.
"""

import signal
import sys
import time
from collections.abc import Sequence
from typing import Any

USAGE = """\
usage: quire COMMAND ...

  serve [MODEL] [flags]   serve a model with the OpenAI API; `quire serve --help` lists the flags
  pull [MODEL]            download a model, so that serving it starts at once
  models [NAME|FOLDER]    list the supported architectures, or say how an architecture or a model is served
  bench COMMAND [flags]   measure a server, or the engine in this process; see `quire bench --help`
  keys DIR                make the keys for services on several hosts, each host's in a folder of DIR
  replay FILE [flags]     replay what `quire serve --record` has written; see `quire replay --help`
  knobs [--vllm]          print the settings of `quire serve`, or the treatment of vLLM's flags, as Markdown tables
  version                 print the version

MODEL is a folder, a .gguf file or a Hugging Face name; without one, the embedded model is served.
"""

EXIT_FAILED = 1
EXIT_WRONG_USAGE = 2  # wrong settings, or a model that cannot be served
EXIT_INTERRUPTED = 130


def main(argv: Sequence[str] | None = None) -> None:
    """Run the command line and end the process."""
    began = time.monotonic()
    signal.signal(signal.SIGINT, signal.SIG_DFL)  # no traceback while modules are imported
    from shared.errors import ConfigError, ModelError, QuireError
    from shared.startup import report_error

    try:
        sys.exit(run(list(sys.argv[1:] if argv is None else argv), began))
    except QuireError as error:
        report_error("quire", error)
        sys.exit(EXIT_WRONG_USAGE if isinstance(error, (ConfigError, ModelError)) else EXIT_FAILED)
    except KeyboardInterrupt:
        sys.exit(EXIT_INTERRUPTED)


def run(argv: list[str], began: float) -> int:
    """Run the command; return the exit status."""
    match argv:
        case ["serve", *rest]:
            return serve(rest, began)
        case ["pull", *rest]:
            return pull(rest)
        case ["models", "--help" | "-h"]:
            print(USAGE, end="")
            return 0
        case ["models"] | ["models", _]:
            return models(*argv[1:])
        case ["bench", *rest]:
            return bench(rest)
        case ["keys", folder] if not folder.startswith("-"):
            return keys(folder)
        case ["replay", *rest]:
            return replay(rest)
        case ["knobs"] | ["knobs", "--vllm"]:
            return knobs(vllm=len(argv) > 1)
        case ["version" | "--version"]:
            return version()
        case ["help" | "--help" | "-h"]:
            print(USAGE, end="")
            return 0
        case ["knobs" | "version" | "--version" as command, *_]:
            allowed = "no arguments" if command != "knobs" else "only --vllm"
            print(f"quire: {command} takes {allowed}\n", file=sys.stderr)
        case ["models", *_]:
            print("quire: models takes one architecture, folder or file\n", file=sys.stderr)
        case ["keys", *_]:
            print("quire: keys takes one folder\n", file=sys.stderr)
        case [command, *_]:
            print(f"quire: there is no command {command}\n", file=sys.stderr)
    print(USAGE, end="", file=sys.stderr)
    return EXIT_WRONG_USAGE


def serve(argv: list[str], began: float) -> int:
    """Serve a model until a signal."""
    import os

    from quire import settings, vllm
    from quire.serve import serve
    from shared.config import flag_parser

    parser = flag_parser([settings.public_config()], prog="quire serve", description="Serve a model.")
    parser.add_argument("positional", metavar="MODEL", nargs="?", help="The same as --model.")
    vllm.add_flags(parser)
    flags = vars(parser.parse_args(vllm.spell_out(argv)))
    take_positional_model(flags)
    raise_on_signals()
    notes: list[str] = []
    return serve(settings.read(flags, os.environ, note=notes.append), began, notes)


def pull(argv: list[str]) -> int:
    """Download a model into the cache and print its folder."""
    import os

    from quire.startup_checks import check_model
    from shared.config import ModelConfig, flag_parser, resolve
    from shared.hub.checkpoint import locate

    parser = flag_parser([ModelConfig], prog="quire pull", description="Download a model.")
    parser.add_argument("positional", metavar="MODEL", nargs="?", help="The same as --model.")
    flags = vars(parser.parse_args(argv))
    take_positional_model(flags)
    raise_on_signals()
    config = resolve(ModelConfig, flags, os.environ)
    folder = locate(config.model, config.revision, config.download_dir)
    check_model(folder)
    print(folder)
    return 0


def models(name: str = "") -> int:
    """Print the supported architectures, or how the architecture, folder or file `name` is served."""
    from quire.models import describe, listing

    print(describe(name) if name else listing(), end="")
    return 0


def bench(argv: list[str]) -> int:
    """Measure a server, or the engine in this process."""
    from quire.bench.command import bench

    raise_on_signals()
    return bench(argv)


def keys(folder: str) -> int:
    """Make the keys of the services in a folder, as far as they are missing, and print the new files."""
    from pathlib import Path

    from shared.curve import make_keys

    made = make_keys(Path(folder))
    print("\n".join(map(str, made)) if made else f"{folder} has all keys")
    return 0


def replay(argv: list[str]) -> int:
    """Replay a record, and tell what happened."""
    from pathlib import Path

    from quire.replay import ReplayConfig, replay_file
    from shared.config import flag_parser, resolve

    description = "Feed a record of a scheduler to its core again, plan by plan, and tell what happened."
    parser = flag_parser([ReplayConfig], prog="quire replay", description=description, only_flags=True)
    parser.add_argument("file", metavar="FILE", help="A file of the folder that --record names.")
    flags = vars(parser.parse_args(argv))
    for line in replay_file(Path(flags.pop("file")), resolve(ReplayConfig, flags, {})):
        print(line)
    return 0


def knobs(vllm: bool) -> int:
    """Print the table of settings for the documentation, or the page about vLLM's flags."""
    if vllm:
        from quire.vllm import markdown_page as markdown
    else:
        from quire.settings import markdown_table as markdown

    print(markdown(), end="")
    return 0


def version() -> int:
    """Print the version of the installed package."""
    from importlib.metadata import PackageNotFoundError
    from importlib.metadata import version as version_of

    try:
        print(version_of("quire-server"))
    except PackageNotFoundError:
        print("not installed; run from its source")
    return 0


def take_positional_model(flags: dict[str, Any]) -> None:
    """Turn the argument MODEL into the flag --model. Raise `ConfigError` if the two differ."""
    from shared.errors import ConfigError

    positional = flags.pop("positional", None)
    if positional is not None and flags.setdefault("model", positional) != positional:
        raise ConfigError(f"two models are named: {positional} and --model {flags['model']}")


def raise_on_signals() -> None:
    """Make SIGINT and SIGTERM raise KeyboardInterrupt, so that open work is cleaned up."""
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.default_int_handler)
