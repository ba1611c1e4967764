"""Reading of a checkpoint's config.json: fields with a type and a name in the error."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any, TypeVar

import msgspec

from shared.errors import ModelError

T = TypeVar("T", int, float, bool, str)


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
    value = config.get(name)
    if value is None:
        value = default
    if value is None:
        raise ModelError(f"config.json: {name} is missing")
    try:
        return msgspec.convert(value, kind)
    except msgspec.ValidationError as error:
        raise ModelError(f"config.json: {name}: {error}") from error
