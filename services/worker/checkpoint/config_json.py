"""Reading of a checkpoint's config.json: fields with a type and a name in the error."""

import json
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any, TypeVar

import msgspec

from shared.errors import ModelError

LARGEST = 2**31 - 1
"""The largest of sizes: indices of some kernels have 32 bits, and no model comes near."""
MOST_PARTS = 2**16
"""The largest number of layers, and of experts in one: each costs time before its first tensor is looked for."""

T = TypeVar("T", int, float, bool, str)
M = TypeVar("M")


class UnsupportedByFamily(ModelError):
    """A config.json may be right, but asks for something that Quire's own code for the model does not have."""


def read_config(folder: Path) -> dict[str, Any]:
    """The config.json of a model folder; raises ModelError naming the file.

    It is read by Python's own module, as transformers reads it: `Infinity`, `NaN` and numbers of any size are taken.
    A field that a family reads is checked where it is read.
    """
    path = folder / "config.json"
    try:
        config = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError as error:
        raise ModelError(f"{path} does not exist: {folder} is not a model folder") from error
    except (OSError, ValueError, RecursionError) as error:
        raise ModelError(f"{path}: {error}") from error
    if not isinstance(config, dict):
        raise ModelError(f"{path}: must hold an object")
    return config


def field(config: Mapping[str, Any], name: str, kind: type[T], default: T | None = None) -> T:
    """Return `config[name]` as a `kind`; absent or null it is `default`, and an error if there is none.

    An absent one is an UnsupportedByFamily: transformers' class for the model may have a default.
    """
    value = nullable(config, name, kind, default)
    if value is None:
        value = default
    if value is None:
        unfit = ModelError if name in config else UnsupportedByFamily
        raise unfit(f"config.json: {name} is missing")
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


def size(config: Mapping[str, Any], name: str, default: int | None = None, most: int = LARGEST) -> int:
    """`config[name]` as a number of things, 1 to `most`; raises ModelError naming the field."""
    return check_size(name, field(config, name, int, default), most)


def check_size(name: str, value: int, most: int = LARGEST) -> int:
    """`value`, which is what the field `name` gives, if it is from 1 to `most`; raises ModelError naming it if not."""
    if value < 1:
        raise ModelError(f"config.json: {name} must be at least 1, got {value}")
    if value > most:
        raise ModelError(f"config.json: {name} must be at most {most}, got {value}")
    return value


def number(config: Mapping[str, Any], name: str, default: float | None = None, *, zero: bool = False) -> float:
    """`config[name]` as a positive number, or as 0 where that is allowed; raises ModelError naming the field."""
    value = field(config, name, float, default)
    if not math.isfinite(value) or value < 0 or (value == 0 and not zero):
        wanted = "a number that is not negative" if zero else "a positive number"
        raise ModelError(f"config.json: {name} must be {wanted}, got {value}")
    return value


def choice(config: Mapping[str, Any], name: str, meanings: Mapping[str, M], default: str) -> M:
    """Return what the word in `config[name]` means here; raise UnsupportedByFamily naming those that are known."""
    word = field(config, name, str, default)
    if word not in meanings:
        raise UnsupportedByFamily(f"config.json: {name} {word!r} is not supported (supported: {', '.join(meanings)})")
    return meanings[word]


def refuse(config: Mapping[str, Any], **unsupported: bool) -> None:
    """Raise UnsupportedByFamily if a switch in `config` has the value named here. Absent and null are fine."""
    for name, value in unsupported.items():
        if config.get(name) is not None and field(config, name, bool) is value:
            raise UnsupportedByFamily(f"config.json: {name} {str(value).lower()} is not supported")
