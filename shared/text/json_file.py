"""JSON files beside a model, which people and programs of all kinds have written: objects, and numbers in them."""

import json
import math
from pathlib import Path
from typing import Any

from shared.errors import ModelError


def read_json(path: Path) -> dict[str, Any]:
    """Return the object in a JSON file, `{}` if there is no such file. Raises `ModelError` if it is not one."""
    if not path.is_file():
        return {}
    try:
        return parse_object(path.read_bytes())
    except OSError as error:
        raise ModelError(f"{path}: {error.strerror}") from error
    except ValueError as error:
        raise ModelError(f"{path}: {error}") from error


def parse_object(text: str | bytes) -> dict[str, Any]:
    """Return the JSON object in `text`. Raises `ValueError` if it is something else."""
    try:
        value = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise ValueError(f"is not JSON: {error}") from error
    if not isinstance(value, dict):
        raise ValueError("must be a JSON object")
    return value


def number(value: Any) -> float | None:
    """Return the finite number that a JSON value is or spells, as `"0.5"` does; None if it is none."""
    if isinstance(value, bool) or not isinstance(value, (int, float, str)):
        return None
    try:
        found = float(value)
    except (ValueError, OverflowError):
        return None
    return found if math.isfinite(found) else None


def whole_number(value: Any) -> int | None:
    """Return what `number` does if it has no fraction, as 50.0; None otherwise."""
    if isinstance(value, int) and not isinstance(value, bool):
        return value
    found = number(value)
    return int(found) if found is not None and found.is_integer() else None
