"""Reads the JSON files of a model folder. Many programs write them, so types of values cannot be relied on."""

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
    """Return the JSON object in `text`. Raise `ValueError` if it is something else."""
    try:
        value = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise ValueError(f"is not JSON: {error}") from error
    if not isinstance(value, dict):
        raise ValueError("must be a JSON object")
    return value


def as_number(value: Any) -> float | None:
    """Return a JSON value as a finite number, also if it is a string such as "0.5"; None if it is no number."""
    if isinstance(value, bool) or not isinstance(value, (int, float, str)):
        return None
    try:
        number = float(value)
    except (ValueError, OverflowError):
        return None
    return number if math.isfinite(number) else None


def as_integer(value: Any) -> int | None:
    """Return a JSON value as an integer, also if it is 50.0 or "50"; None if it is no integer."""
    if isinstance(value, int) and not isinstance(value, bool):
        return value
    number = as_number(value)
    return int(number) if number is not None and number.is_integer() else None
