"""Checks that output files can be written before a run, since its figures cannot be had again."""

from pathlib import Path

from shared.errors import ConfigError


def check_writable(flag: str, path: str | Path) -> None:
    """Make the folder of a file and check that the file can be written. An existing file keeps its content.

    Raise `ConfigError`, which names the flag.
    """
    file = Path(path)
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        there = file.exists()
        if there and not (file.is_file() or file.is_dir()):  # a device or a pipe, which may not like to be tried
            return
        with file.open("a"):
            pass
        if not there:
            file.unlink()
    except (OSError, ValueError) as error:  # a ValueError for a name that no file can have
        raise ConfigError(f"{flag}: cannot write {path}: {getattr(error, 'strerror', None) or error}") from error
