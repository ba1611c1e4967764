"""Numbers in files that people and programs of all kinds have written: `0.5`, `"0.5"`, `50.0`."""

import math
from typing import Any


def number(value: Any) -> float | None:
    """The finite number that a JSON value is, or spells; None if it is none."""
    if isinstance(value, bool) or not isinstance(value, (int, float, str)):
        return None
    try:
        found = float(value)
    except (ValueError, OverflowError):
        return None
    return found if math.isfinite(found) else None


def whole_number(value: Any) -> int | None:
    """As `number`, for one without a fraction."""
    if isinstance(value, int) and not isinstance(value, bool):
        return value
    found = number(value)
    return int(found) if found is not None and found.is_integer() else None
