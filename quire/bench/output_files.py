"""Checks before a run that its output files can be written, since the run would be lost, and writes JSON files."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from shared.errors import ConfigError


def check_writable(flag: str, path: str | Path) -> None:
    """Make the folder of a file and check that the file can be written. An existing file keeps its content.

    Raise `ConfigError`, which names the flag.
    """
    file = Path(path)
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        existed = file.exists()
        if existed and not (file.is_file() or file.is_dir()):  # opening a device or a pipe may have effects
            return
        with file.open("a"):
            pass
        if not existed:
            file.unlink()
    except (OSError, ValueError) as error:  # ValueError: a name that no file can have
        raise ConfigError(f"{flag}: cannot write {path}: {getattr(error, 'strerror', None) or error}") from error


def write_json(path: str, record: Mapping[str, Any]) -> None:
    """Write `record` to the file of --output-json. Raise `ConfigError` if that fails."""
    try:
        Path(path).write_text(json.dumps(record, indent=4), encoding="utf-8")
    except OSError as error:
        raise ConfigError(f"--output-json {path}: {error.strerror or error}") from error
