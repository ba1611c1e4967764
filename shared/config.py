"""Settings, declared once in a frozen struct per service, and read from flags, the environment and a file.

A field of the struct is a knob. Its name, type, default, bounds (`msgspec.Meta`) and one sentence (`Meta.description`)
define all of it: `--max-num-seqs`, `QUIRE_MAX_NUM_SEQS` and the file's key `max-num-seqs` are made from `max_num_seqs`,
and so are `--help` and the tables in the documentation. A flag overrides the environment, which overrides the file
named by `--config` (YAML, which includes JSON). An unknown name or a value out of bounds is a `ConfigError` naming it.

A list can be JSON or a single string, which is a list of one, or in the environment a list separated by commas. An
empty variable is unset, and so is a null in the file.

Services that share a knob inherit it (`ModelConfig`), or its annotation (`LogLevel`).
"""

import argparse
import json
import types
import typing
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any, Literal, NamedTuple, NoReturn, TypeVar

import msgspec
from msgspec import Meta, Struct

from shared.errors import ConfigError

ENVIRONMENT_PREFIX = "QUIRE_"

C = TypeVar("C", bound=Struct)


LogLevel = Annotated[
    Literal["debug", "info", "warning", "error", "critical"], Meta(description="Minimum level of the lines in the log.")
]
LogFormat = Annotated[
    Literal["text", "json"], Meta(description="Format of the lines in the log: text, or a JSON object each.")
]
"""Knobs of every service."""


ZmqKeys = Annotated[
    str,
    Meta(
        description="Folder of keys that `quire keys` has made, by which services encrypt and authenticate connections "
        "over tcp; empty: none."
    ),
]
Insecure = Annotated[
    bool, Meta(description="Allow tcp between hosts without keys, so neither encrypted nor authenticated.")
]
"""Knobs of every service; see `shared.curve`."""

AdminPort = Annotated[
    int, Meta(ge=0, le=65535, description="Port of 127.0.0.1 at which POST /drain has the service drain; 0: none.")
]
MAX_SECONDS = 1e9
"""The longest time that a knob may have: clocks and timers take it, and nobody waits for 30 years."""

DrainTimeout = Annotated[
    float,
    Meta(
        ge=0,
        le=MAX_SECONDS,
        description="Seconds that running requests get to finish once a drain has begun, as SIGTERM begins it.",
    ),
]
"""Knobs of the services that have requests; see `shared.admin`."""

Supervisor = Annotated[
    int, Meta(ge=0, description="Process id of the parent that restarts this service; it ends with that one.")
]
SupervisorAddress = Annotated[
    str, Meta(description="Address at which a supervisor awaits this service's signs of life; empty: none does.")
]
"""Knobs of every service, which `quire serve` sets."""


class ModelConfig(Struct, frozen=True, kw_only=True):
    """The knobs of every service that reads model files."""

    model: Annotated[
        str, Meta(description="Folder, .gguf file or Hugging Face name of the model; empty: the embedded model.")
    ] = ""
    revision: Annotated[str | None, Meta(description="Branch, tag or commit of a Hugging Face model.")] = None
    download_dir: Annotated[
        str | None, Meta(description="Folder for downloads from Hugging Face, instead of its own cache.")
    ] = None


MaxModelLen = Annotated[
    Annotated[int, Meta(ge=2)] | None,
    Meta(description="Tokens of prompt and output; at most, and if unset, the model's own limit. Reduced to fit."),
]
MaxNumSeqs = Annotated[int, Meta(ge=1, le=65536, description="Sequences that run at the same time.")]
MaxNumBatchedTokens = Annotated[
    Annotated[int, Meta(ge=2, le=2**31 - 1)] | None,
    Meta(
        description="Tokens computed in one step, more than max-num-seqs; unset: max-num-seqs and 8192 more on a "
        "GPU, 128 more on a CPU, or up to 2048 that take no longer than max-step-ms."
    ),
]
"""Sizes of a step. The scheduler plans by them, and a worker on a GPU measures the memory that they need."""

MAX_NUM_SEQS = 128
CPU_PREFILL_TOKENS = 128
GPU_PREFILL_TOKENS = 8192
"""Prompt tokens in a step, besides one token of each running sequence, if `max_num_batched_tokens` is unset."""


def tokens_of_largest_step(max_num_batched_tokens: int | None, max_num_seqs: int, device: str) -> int:
    """Return the tokens that a step on `device` may have."""
    prefill_tokens = CPU_PREFILL_TOKENS if device.startswith("cpu") else GPU_PREFILL_TOKENS
    return max_num_batched_tokens or max_num_seqs + prefill_tokens


class Knob(NamedTuple):
    """One setting, as help texts and tables show it."""

    name: str  # the name of the struct's field
    type: Any
    default: Any
    doc: str

    @property
    def flag(self) -> str:
        return "--" + self.name.replace("_", "-")

    @property
    def variable(self) -> str:
        return ENVIRONMENT_PREFIX + self.name.upper()

    @property
    def type_text(self) -> str:
        """Return the type and its bounds as help texts show them."""
        return _describe(self.type)


def knobs(config_type: type[Struct]) -> list[Knob]:
    """Return the knobs that a config declares, in order."""
    hints = typing.get_type_hints(config_type, include_extras=True)
    return [
        Knob(field.name, hints[field.name], _default(field), _description(hints[field.name]))
        for field in msgspec.structs.fields(config_type)
    ]


def load(config_type: type[C], argv: Sequence[str], environment: Mapping[str, str], *, prog: str) -> C:
    """Return a config from flags, environment and file. Raise ConfigError, and SystemExit only for `--help`."""
    parser = flag_parser([config_type], prog=prog)
    return resolve(config_type, vars(parser.parse_args(argv)), environment)


def flag_parser(
    config_types: Iterable[type[Struct]], *, prog: str, description: str = "", only_flags: bool = False
) -> argparse.ArgumentParser:
    """Return a parser of the flags of several configs, each knob once. Parsed values are strings, lists and bools.

    With `only_flags`, help texts offer neither a file nor the environment: for settings of one run, not of a service.
    """
    parser = _Parser(prog=prog, description=description, allow_abbrev=False, argument_default=argparse.SUPPRESS)
    if not only_flags:
        help_text = "YAML file of settings; flags and environment win over it."
        parser.add_argument("--config", metavar="FILE", help=help_text)
    seen: set[str] = set()
    for knob in (knob for config_type in config_types for knob in knobs(config_type)):
        if knob.name not in seen:
            seen.add(knob.name)
            _add_flag(parser, knob, only_flags)
    return parser


def resolve(
    config_type: type[C],
    flags: Mapping[str, Any],
    environment: Mapping[str, str],
    file: Mapping[str, Any] | None = None,
) -> C:
    """Return a config from parsed flags, `environment` and the `--config` file. Flags of other configs are ignored.

    `file` has the file's settings if the caller has already read it.
    """
    values: dict[str, Any] = {}
    sources: dict[str, str] = {}  # where the user wrote each value
    if file is None:
        file = read_file(flags["config"]) if "config" in flags else {}
    for knob in knobs(config_type):
        if file.get(knob.name) is not None:
            values[knob.name] = _from_file(knob, file[knob.name])
            sources[knob.name] = f"--config {flags.get('config', '')}: {knob.flag[2:]}"
        if raw := environment.get(knob.variable, "").strip():
            values[knob.name] = _from_variable(raw) if _is_list(knob.type) else raw
            sources[knob.name] = knob.variable
        if knob.name in flags:
            values[knob.name] = _from_flag(knob, flags[knob.name])
            sources[knob.name] = knob.flag
    return _build(config_type, values, sources)


def read_file(path: str) -> dict[str, Any]:
    """Return the settings in a YAML file by the names of the fields."""
    try:
        data = msgspec.yaml.decode(Path(path).read_bytes())
    except OSError as error:
        raise ConfigError(f"--config {path}: {error.strerror}") from error
    except msgspec.DecodeError as error:
        raise ConfigError(f"--config {path}: {' '.join(str(error).split())}") from error
    if data is None:  # an empty file, or nothing but comments
        return {}
    if not isinstance(data, dict):
        raise ConfigError(f"--config {path}: must be a mapping of settings")
    return {str(key).replace("-", "_"): value for key, value in data.items()}


def to_flags(config: Struct) -> list[str]:
    """Return the flags from which `load` makes a config equal to this one. They start a service."""
    argv: list[str] = []
    for knob in knobs(type(config)):
        value = getattr(config, knob.name)
        if value == knob.default:
            continue
        if isinstance(value, bool):
            argv.append(knob.flag if value else "--no-" + knob.flag[2:])
        elif isinstance(value, (list, tuple)):
            argv += [f"{knob.flag}={item}" for item in value]  # one word per item, since an item may begin with a dash
        else:
            argv.append(f"{knob.flag}={value}")
    return argv


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        raise ConfigError(message)


def _add_flag(parser: argparse.ArgumentParser, knob: Knob, only_flags: bool) -> None:
    variable = "" if only_flags else f"; {knob.variable}"
    help_text = f"{knob.doc} ({knob.type_text}; default: {knob.default!r}{variable})".replace("%", "%%")
    if knob.default is False and only_flags:  # so it cannot be true without the flag
        parser.add_argument(knob.flag, action="store_true", help=help_text)
    elif _bare(knob.type) is bool:
        parser.add_argument(knob.flag, action=argparse.BooleanOptionalAction, help=help_text)
    elif _is_list(knob.type):
        parser.add_argument(knob.flag, action="extend", nargs="+", metavar="VALUE", help=help_text)
    else:
        choices = _choices(knob.type)
        parser.add_argument(knob.flag, metavar=f"{{{','.join(choices)}}}" if choices else "VALUE", help=help_text)


def _from_file(knob: Knob, value: Any) -> Any:
    """Convert a value of a YAML file to the type of its knob: YAML reads `api-key: 123` as a number, and not a list."""
    if _is_list(knob.type):
        return [_as_text(item) for item in (value if isinstance(value, list) else [value])]
    return _as_text(value) if _bare(knob.type) is str else value


def _as_text(value: Any) -> Any:
    """Return numbers and mappings of a YAML file as strings, the latter as JSON. Leave other values as they are."""
    if isinstance(value, dict):
        return json.dumps(value, default=str)  # YAML has dates, JSON has not
    is_number = isinstance(value, (int, float)) and not isinstance(value, bool)
    return str(value) if is_number else value


def _from_variable(raw: str) -> list[str]:
    """Return the list in an environment variable: JSON, or words with commas between them."""
    items = _json_list(raw)
    return [word.strip() for word in raw.split(",")] if items is None else items


def _from_flag(knob: Knob, value: Any) -> Any:
    if not _is_list(knob.type) or not isinstance(value, str | Sequence):
        return value
    words = [value] if isinstance(value, str) else list(value)
    items = _json_list(words[0]) if len(words) == 1 else None
    return words if items is None else items


def _json_list(text: Any) -> list[str] | None:
    """Return the strings of a JSON list, as vLLM's command lines write lists; None if `text` is something else."""
    if not isinstance(text, str) or not text.lstrip().startswith("["):
        return None
    try:
        items = json.loads(text)
    except ValueError:
        return None
    return items if isinstance(items, list) and all(isinstance(item, str) for item in items) else None


def _build(config_type: type[C], values: Mapping[str, Any], sources: Mapping[str, str]) -> C:
    for knob in knobs(config_type):
        if knob.name not in values:
            continue
        try:  # each value by itself, so that the error can name the knob
            msgspec.convert(values[knob.name], knob.type, strict=False)
        except msgspec.ValidationError as error:
            choices = _choices(knob.type)
            rule = f"must be one of {', '.join(choices)}" if choices else error
            raise ConfigError(f"{sources[knob.name]} {values[knob.name]!r}: {rule}") from error
    return msgspec.convert(dict(values), config_type, strict=False)


def _default(field: msgspec.structs.FieldInfo) -> Any:
    if field.default_factory is not msgspec.NODEFAULT:
        return field.default_factory()
    return None if field.default is msgspec.NODEFAULT else field.default


def _metas(hint: Any) -> list[Meta]:
    """Return the bounds and descriptions of a type. An optional type has them at the part that is not None."""
    own = [meta for meta in getattr(hint, "__metadata__", ()) if isinstance(meta, Meta)]
    parts: tuple[Any, ...] = ()
    if typing.get_origin(hint) is Annotated:
        parts = typing.get_args(hint)[:1]
    elif typing.get_origin(hint) in (typing.Union, types.UnionType):
        parts = typing.get_args(hint)
    return own + [meta for part in parts for meta in _metas(part)]


def _description(hint: Any) -> str:
    return next((meta.description for meta in _metas(hint) if meta.description), "")


def _bare(hint: Any) -> Any:
    """Return the type without `Annotated`, and without `None` if that is the only alternative."""
    if typing.get_origin(hint) is Annotated:
        return _bare(typing.get_args(hint)[0])
    if typing.get_origin(hint) in (typing.Union, types.UnionType):
        rest = [part for part in typing.get_args(hint) if part is not type(None)]
        return _bare(rest[0]) if len(rest) == 1 else hint
    return hint


def _is_list(hint: Any) -> bool:
    return typing.get_origin(_bare(hint)) is list


def _choices(hint: Any) -> list[str]:
    """Return the values of a Literal type; empty for other types."""
    bare = _bare(hint)
    return [str(choice) for choice in typing.get_args(bare)] if typing.get_origin(bare) is typing.Literal else []


def _describe(hint: Any) -> str:
    bare = _bare(hint)
    if choices := _choices(bare):
        return " | ".join(choices)
    name = "list of " + _describe(typing.get_args(bare)[0]) if _is_list(bare) else bare.__name__
    bounds = [
        f"{sign} {getattr(meta, key)}"
        for meta in _metas(hint)
        for key, sign in (("gt", ">"), ("ge", "≥"), ("lt", "<"), ("le", "≤"))
        if getattr(meta, key) is not None
    ]
    return " ".join([name, *bounds])
