"""`ConfigJson`: the fields of a checkpoint's config.json, each read with its type and named in its errors."""

import math
from collections.abc import Iterator, Mapping
from typing import Any, TypeVar

import msgspec

from shared.errors import ModelError

MAX_SIZE = 2**31 - 1
"""The largest size of anything. Some kernels have 32-bit indices, and no model comes near it."""
MAX_MODULES = 2**16
"""The largest number of layers, and of experts in a layer. Each of them costs time before any tensor is read."""

Scalar = TypeVar("Scalar", int, float, bool, str)
T = TypeVar("T")


class UnsupportedByFamily(ModelError):
    """Raised if a config.json asks for a feature that the family of the model lacks. transformers may have it."""


class ConfigJson(Mapping[str, Any]):
    """The fields of a config.json, or of an object inside one. Every method raises ModelError naming a wrong field."""

    def __init__(self, fields: Mapping[str, Any]) -> None:
        self._fields = fields

    def __getitem__(self, name: str) -> Any:
        return self._fields[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._fields)

    def __len__(self) -> int:
        return len(self._fields)

    def __repr__(self) -> str:
        return repr(self._fields)

    def replace(self, **fields: Any) -> "ConfigJson":
        """Return a copy in which these fields have these values."""
        return ConfigJson({**self._fields, **fields})

    def with_defaults(self, **fields: Any) -> "ConfigJson":
        """Return a copy in which absent fields have these values."""
        return ConfigJson({**fields, **self._fields})

    def section(self, name: str) -> "ConfigJson":
        """Return the object in the field `name`, or an empty one if the field is absent or null."""
        return ConfigJson(convert(self.get(name) or {}, name, dict[str, Any]))

    def field(self, name: str, expected: type[Scalar], default: Scalar | None = None) -> Scalar:
        """Return the field `name` as an `expected`, or `default` if it is absent or null.

        Raise ModelError if there is no default either. If the field is absent, it is an UnsupportedByFamily,
        since transformers may have a default.
        """
        value = self.nullable(name, expected, default)
        if value is None:
            value = default
        if value is None:
            error = ModelError if name in self else UnsupportedByFamily
            raise error(f"config.json: {name} is missing")
        return value

    def nullable(self, name: str, expected: type[Scalar], default: Scalar | None = None) -> Scalar | None:
        """Return the field `name` as an `expected`: None if it is null, `default` if it is absent."""
        value = self.get(name, default)
        return None if value is None else convert(value, name, expected)

    def size(self, name: str, default: int | None = None, maximum: int = MAX_SIZE) -> int:
        """Return the field `name`, an integer from 1 to `maximum`."""
        return check_size(name, self.field(name, int, default), maximum)

    def number(self, name: str, default: float | None = None, *, zero: bool = False) -> float:
        """Return the field `name`, a positive number; with `zero`, 0 is accepted too."""
        value = self.field(name, float, default)
        if not math.isfinite(value) or value < 0 or (value == 0 and not zero):
            expected = "a number that is not negative" if zero else "a positive number"
            raise ModelError(f"config.json: {name} must be {expected}, got {value}")
        return value

    def choice(self, name: str, meanings: Mapping[str, T], default: str) -> T:
        """Return what `meanings` has for the field `name`. Raise UnsupportedByFamily if it has nothing."""
        word = self.field(name, str, default)
        if word not in meanings:
            supported = ", ".join(meanings)
            raise UnsupportedByFamily(f"config.json: {name} {word!r} is not supported (supported: {supported})")
        return meanings[word]

    def refuse(self, **unsupported: bool) -> None:
        """Raise UnsupportedByFamily if a field named here has the value given here. Absent and null are fine."""
        for name, value in unsupported.items():
            if self.get(name) is not None and self.field(name, bool) is value:
                raise UnsupportedByFamily(f"config.json: {name} {str(value).lower()} is not supported")


def convert(value: Any, name: str, expected: type[T]) -> T:
    """Return `value` as an `expected`. Raise ModelError naming the field `name` if it has another type."""
    try:
        return msgspec.convert(value, expected)
    except (msgspec.ValidationError, UnicodeEncodeError) as error:
        raise ModelError(f"config.json: {name}: {error}") from error


def check_size(name: str, value: int, maximum: int = MAX_SIZE) -> int:
    """Return `value`. Raise ModelError naming the field `name` unless it is from 1 to `maximum`."""
    if value < 1:
        raise ModelError(f"config.json: {name} must be at least 1, got {value}")
    if value > maximum:
        raise ModelError(f"config.json: {name} must be at most {maximum}, got {value}")
    return value
