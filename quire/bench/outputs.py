"""Whether files can be written, found out before there is anything to write: a run's figures cannot be had again."""

from pathlib import Path

from shared.errors import ConfigError


def check_writable(flag: str, path: str | Path) -> None:
    """Make the folder of a file, and see whether the file could be written; what it holds stays, and no new one does.

    Raises `ConfigError`, which names the flag.
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
