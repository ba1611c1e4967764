"""Translates vLLM's settings, so that a command line for vLLM works unchanged.

A setting that Quire lacks, or has under another name, is one of these:
- *renamed*: Quire has it under another name (`RENAMED`), or has another name for a value (`RENAMED_VALUES`).
- *accepted without effect* (`ACCEPTED`): Quire does so anyway, or it is a hint that has no meaning here. One line in
  the log says so.
- *refused* by name and with the reason (`REFUSED`), unless it has a neutral value, one that asks for nothing, such as
  vLLM's default.

The command line, the configuration file, the arguments of `quire.LLM` and the page `docs/vllm_flags.md` use the same
tables, which are in `quire.vllm_settings`.
"""

import argparse
import json
import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from quire.vllm_settings import (
    ACCEPTED,
    COUNTS,
    LIST_FLAGS,
    REFUSED,
    REFUSED_METHODS,
    RENAMED,
    RENAMED_VALUES,
    SHORT_FLAGS,
    VARIABLES,
)
from shared.errors import ConfigError

GIB = 2**30


class Setting(NamedTuple):
    """A setting of vLLM that Quire lacks. `neutral_values` ask for nothing; None: every value is accepted.

    `switch`: the flag takes no value.
    """

    name: str
    switch: bool
    neutral_values: tuple[str, ...] | None
    reason: str

    @property
    def flag(self) -> str:
        return "--" + self.name.replace("_", "-")

    def accepts(self, value: Any) -> bool:
        """Return whether `value` (from a command line, a file or Python) asks for nothing that Quire lacks."""
        if self.neutral_values is None or value is None or (isinstance(value, (list, tuple, dict)) and not value):
            return True
        return any(_same(_text(value), neutral) for neutral in self.neutral_values)


def _settings() -> Iterator[Setting]:
    for reason, names in ACCEPTED.items():
        for name in names.split():
            yield Setting(name.rstrip("!"), name.endswith("!"), None, reason)
    for reason, names in REFUSED.items():
        for word in names.split():
            name, _, values = word.partition("=")
            switch = name.endswith("!")
            neutral_values = tuple(values.split("|")) if values else ("false",) if switch else ("", "none")
            yield Setting(name.rstrip("!"), switch, neutral_values, reason)


SETTINGS: dict[str, Setting] = {setting.name: setting for setting in _settings()}

METHODS: dict[str, str] = {name: reason for reason, names in REFUSED_METHODS.items() for name in names.split()}
"""Why `LLM` lacks a method of vLLM's, by its name."""


class Translation(NamedTuple):
    """Settings under Quire's names, and a note for each that was accepted without effect."""

    settings: dict[str, Any]
    notes: list[str]


def translate(settings: Mapping[str, Any], *, place: str = "", python: bool = False) -> Translation:
    """Translate vLLM's settings. Raise `ConfigError` for those that cannot be honoured.

    `place` says in messages where the settings were written. With `python`, they are arguments of `LLM`, not flags.
    """
    translated: dict[str, Any] = {}
    notes: list[str] = []
    for name, value in settings.items():
        setting = SETTINGS.get(name)
        if setting is None:
            translated |= _renamed(name, value, place)
            continue
        shown = f"{place}{name}={value!r}" if python else f"{place}{setting.flag}{_shown(setting, value)}"
        if not setting.accepts(value):
            raise ConfigError(f"{shown} is not supported: {setting.reason}")
        notes.append(f"{shown} is accepted without effect: {setting.reason}")
    return Translation(translated, notes)


def _shown(setting: Setting, value: Any) -> str:
    if not setting.switch:
        return f" {value}"
    return "" if _text(value) == "true" else f"={_text(value)}"


def _text(value: Any) -> str:
    if isinstance(value, (dict, list, tuple)):
        return json.dumps(value, default=str)
    return str(value).strip().lower()


def _same(text: str, neutral: str) -> bool:
    """Return whether two values are equal, as numbers if they are numbers: `0.0` equals `0`."""
    try:
        return float(text) == float(neutral)
    except ValueError:
        return text == neutral


def _renamed(name: str, value: Any, place: str) -> dict[str, Any]:
    own = RENAMED.get(name, name)
    if isinstance(value, str):
        value = RENAMED_VALUES.get(own, {}).get(value.lower(), value)
        if own == "log_level":
            value = value.lower()
    if own in COUNTS and isinstance(value, str):
        value = _count(value, f"{place}--{name.replace('_', '-')} {value}")
    if own == "max_model_len" and _text(value) in ("auto", "-1"):
        return {}  # as if unset: the model's own context, as far as it fits
    if name == "kv_cache_memory_bytes" and value is not None:
        value = _gib(value, f"{place}--kv-cache-memory-bytes {value}")
    return {own: value}


def _gib(value: Any, shown: str) -> float:
    """Return a number of bytes in GiB. Raise `ConfigError`, with `shown` as the setting, if it is not a number."""
    number = _count(value, shown) if isinstance(value, str) else value
    try:
        return float(number) / GIB
    except (TypeError, ValueError, OverflowError) as error:
        raise ConfigError(f"{shown}: must be a number of bytes") from error


_COUNT = re.compile(r"(\d+(?:\.\d+)?)([kmgtKMGT]?)i?[bB]?")


def _count(text: str, shown: str) -> Any:
    """Return the number in `text`: `2k` is 2000 and `2K` 2048, up to tera.

    Return other text unchanged; the setting itself refuses it.
    """
    match = _COUNT.fullmatch(text.strip())
    if match is None or not match[2]:
        return text
    base = 1000 if match[2].islower() else 1024
    number = float(match[1]) * base ** ("kmgt".index(match[2].lower()) + 1)
    if not number.is_integer():
        raise ConfigError(f"{shown}: must be a whole number")
    return int(number)


def spell_out(argv: Sequence[str]) -> list[str]:
    """Return a command line with every flag spelled as the parser knows it.

    vLLM accepts short names (`-tp 2`), underscores (`--max_model_len`) and dotted names for parts of JSON values
    (`--compilation-config.mode 3`; the part after the dot is dropped, since no such setting has an effect here).
    """
    result = []
    for word in argv:
        name, equals, value = word.partition("=")
        if re.fullmatch(r"-O\d", word):
            name, equals, value = "-O", "=", word[2:]
        base, _, _ = name.partition(".")
        if base in SHORT_FLAGS:
            name = "--" + SHORT_FLAGS[base]
        elif base.startswith("--"):
            is_vllm = base[2:].replace("-", "_") in SETTINGS
            name = "--" + (base if is_vllm else name)[2:].replace("_", "-")
        result.append(name + equals + value)
    return result


def own_variables(environment: Mapping[str, str]) -> dict[str, str]:
    """Return Quire's names and values of the environment variables of vLLM that it knows, as far as they are set."""
    values = {own: environment.get(name, "").strip() for name, own in VARIABLES.items()}
    variables = {own: value for own, value in values.items() if value}
    if key := variables.get("QUIRE_API_KEY"):
        variables["QUIRE_API_KEY"] = json.dumps([key])  # which may hold a comma
    return variables


def add_flags(parser: argparse.ArgumentParser) -> None:
    """Add the flags of vLLM that Quire lacks to `parser`. Its help omits them; docs/vllm_flags.md lists them."""
    parser.epilog = "vLLM's other flags are accepted, or refused with a reason; docs/vllm_flags.md lists them."
    for name, setting in SETTINGS.items():
        if setting.switch:
            parser.add_argument(setting.flag, action=argparse.BooleanOptionalAction, help=argparse.SUPPRESS)
        else:
            count = "+" if name in LIST_FLAGS else None
            parser.add_argument(setting.flag, nargs=count, help=argparse.SUPPRESS)
    for name in RENAMED:
        parser.add_argument("--" + name.replace("_", "-"), help=argparse.SUPPRESS)


_PAGE = """\
# vLLM's flags

`quire serve` treats the flags of `vllm serve` (0.32, and some of older versions) as listed here, in a file of
`--config` too. So does `quire.LLM` with arguments of these names, but it refuses those of a server
(`shutdown_timeout`, ...). Flags that are not here are Quire's own under the same name ([settings](settings.md)). Names
may be written with underscores, counts as `32k` (32,000) or `32K` (32,768), and short names (`-tp`) are known.
`--max-model-len auto` and `-1` are the default: the model's own limit, or the longest context that fits the memory.
`make docs` writes this page from the code; `quire knobs --vllm` prints it.

"""


def markdown_page() -> str:
    """Return the text of `docs/vllm_flags.md`."""
    rows = ["| vLLM | Quire |", "|---|---|"]
    rows += [f"| `--{name.replace('_', '-')}` | `--{own.replace('_', '-')}` |" for name, own in RENAMED.items()]
    rows += [
        f"| `--{name.replace('_', '-')} {value}` | `--{name.replace('_', '-')} {own}` |"
        for name, values in RENAMED_VALUES.items()
        for value, own in values.items()
    ]
    rows += ["", "| accepted without effect | because |", "|---|---|"]
    rows += [f"| {_flags(names)} | {reason} |" for reason, names in ACCEPTED.items()]
    rows += ["", "| refused, except with the value shown | because |", "|---|---|"]
    rows += [f"| {_flags(names)} | {reason} |" for reason, names in REFUSED.items()]
    return _PAGE + "\n".join(rows) + "\n"


def _flags(names: str) -> str:
    shown = []
    for word in names.split():
        name, _, values = word.partition("=")
        flag = "--" + name.rstrip("!").replace("_", "-")
        shown.append(f"`{flag} {values}`".replace("|", " or ") if values else f"`{flag}`")
    return ", ".join(shown)
