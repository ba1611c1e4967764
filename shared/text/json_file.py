"""Reads the JSON files of a model folder. Many programs write them, so values can have any type."""

import json
import math
from pathlib import Path
from typing import Any

from shared.errors import ModelError


def read_json(path: Path) -> dict[str, Any]:
    """Return the object in a JSON file, or {} if there is no such file. Raise `ModelError` if it holds no object."""
    if not path.is_file():
        return {}
    try:
        return parse_object(path.read_bytes())
    except OSError as error:
        raise ModelError(f"{path}: {error.strerror}") from error
    except ValueError as error:
        raise ModelError(f"{path}: {error}") from error


def parse_object(text: str | bytes) -> dict[str, Any]:
    """Return the JSON object in `text`. Raise `ValueError` if it is not one."""
    try:
        value = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise ValueError(f"is not JSON: {error}") from error
    if not isinstance(value, dict):
        raise ValueError("must be a JSON object")
    return value


def as_number(value: Any) -> float | None:
    """Return a JSON value, or a string such as "0.5", as a finite number; None if it is not one."""
    if isinstance(value, bool) or not isinstance(value, (int, float, str)):
        return None
    try:
        number = float(value)
    except (ValueError, OverflowError):
        return None
    return number if math.isfinite(number) else None


def as_integer(value: Any) -> int | None:
    """Return a JSON value, or one such as 50.0 or "50", as an integer; None if it is not one."""
    if isinstance(value, int) and not isinstance(value, bool):
        return value
    number = as_number(value)
    return int(number) if number is not None and number.is_integer() else None
