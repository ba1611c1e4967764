"""Reading of a checkpoint's config.json: fields with a type and a name in the error."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any, TypeVar

import msgspec

from shared.errors import ModelError

T = TypeVar("T", int, float, bool, str)
M = TypeVar("M")


def read_config(folder: Path) -> dict[str, Any]:
    """The config.json of a model folder; raises ModelError naming the file."""
    path = folder / "config.json"
    try:
        config = msgspec.json.decode(path.read_bytes())
    except FileNotFoundError as error:
        raise ModelError(f"{path} does not exist: {folder} is not a model folder") from error
    except (OSError, msgspec.DecodeError) as error:
        raise ModelError(f"{path}: {error}") from error
    if not isinstance(config, dict):
        raise ModelError(f"{path}: must hold an object")
    return config


def field(config: Mapping[str, Any], name: str, kind: type[T], default: T | None = None) -> T:
    """`config[name]` as a `kind`; absent or null it is `default`, and an error if there is none."""
    value = nullable(config, name, kind, default)
    if value is None:
        value = default
    if value is None:
        raise ModelError(f"config.json: {name} is missing")
    return value


def nullable(config: Mapping[str, Any], name: str, kind: type[T], default: T | None = None) -> T | None:
    """`config[name]` as a `kind`, or None where it is null; absent it is `default`."""
    value = config.get(name, default)
    return None if value is None else convert(value, name, kind)


def convert(value: Any, name: str, kind: type[M]) -> M:
    """`value` as a `kind`; raises ModelError naming the field."""
    try:
        return msgspec.convert(value, kind)
    except msgspec.ValidationError as error:
        raise ModelError(f"config.json: {name}: {error}") from error


def choice(config: Mapping[str, Any], name: str, meanings: Mapping[str, M], default: str) -> M:
    """What the word in `config[name]` means here; raises ModelError naming those that are known."""
    word = field(config, name, str, default)
    if word not in meanings:
        raise ModelError(f"config.json: {name} {word!r} is not supported (supported: {', '.join(meanings)})")
    return meanings[word]


def refuse(config: Mapping[str, Any], **unsupported: bool) -> None:
    """Raise ModelError if a switch in `config` has the value that is not supported. Absent and null are fine."""
    for name, value in unsupported.items():
        if config.get(name) is not None and field(config, name, bool) is value:
            raise ModelError(f"config.json: {name} {str(value).lower()} is not supported")
