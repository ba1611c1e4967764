"""Makes the private folder of a running server, which holds its ipc sockets, and removes it at the end.

The server holds a lock on the folder, which the kernel releases however the server ends. So a folder that can be locked
belongs to a server that has died, and the next start removes it.
"""

import fcntl
import os
import re
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from shared.errors import ConfigError

PREFIX = "quire-serve"
FOLDER_NAME = re.compile(PREFIX + r"\.\d+\.\w+")

MAX_SOCKET_PATH = 100
"""Bytes of the longest path of a socket; the kernel's limit is 107."""

LONGEST_SOCKET = "gateways-255.sock"


@contextmanager
def instance_folder(parent: Path | None = None) -> Iterator[Path]:
    """Make a folder that only this user may enter, and remove it at the end. Remove folders of dead servers first.

    `parent` is by default XDG_RUNTIME_DIR, or else the folder for temporary files.
    """
    parent = parent or default_parent()
    remove_stale(parent)
    folder, lock = _create(parent)
    try:
        yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)
        os.close(lock)


def default_parent() -> Path:
    """Return the first folder for temporary files that is writable and short enough for a socket's path.

    Raise `ConfigError` if there is none.
    """
    candidates = [os.environ.get("XDG_RUNTIME_DIR"), tempfile.gettempdir(), "/tmp"]
    for parent in (Path(path) for path in candidates if path):
        longest_path = parent / f"{PREFIX}.{2**22}.{'x' * 8}" / LONGEST_SOCKET
        if os.access(parent, os.W_OK | os.X_OK) and len(os.fsencode(longest_path)) <= MAX_SOCKET_PATH:
            return parent
    raise ConfigError(
        f"there is no writable folder with a short path for sockets among {', '.join(filter(None, candidates))}"
    )


def remove_stale(parent: Path) -> list[Path]:
    """Remove the folders in `parent` whose servers are dead, and return them."""
    return [
        folder
        for folder in sorted(parent.glob(f"{PREFIX}.*"))
        if FOLDER_NAME.fullmatch(folder.name) and _remove(folder)
    ]


def _create(parent: Path) -> tuple[Path, int]:
    """Make and lock a folder. Return it and the file descriptor that holds the lock."""
    while True:
        folder = Path(tempfile.mkdtemp(prefix=f"{PREFIX}.{os.getpid()}.", dir=parent))  # mode 0700
        with suppress(FileNotFoundError):
            lock = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
            fcntl.flock(lock, fcntl.LOCK_EX)
            if folder.exists():  # otherwise another start has removed it before it was locked
                return folder, lock
            os.close(lock)


def _remove(folder: Path) -> bool:
    """Remove a folder if it is this user's and its server is dead. Return whether it was removed."""
    try:
        lock = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
    except OSError:  # another user's folder, or it is gone
        return False
    try:
        if os.fstat(lock).st_uid != os.getuid():
            return False
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:  # its server is alive
        return False
    else:
        shutil.rmtree(folder, ignore_errors=True)
        return True
    finally:
        os.close(lock)
