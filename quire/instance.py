"""The private folder of a running server, which holds its ipc sockets and is removed with it.

The server locks the folder itself; the kernel drops the lock however the server ends. So a folder that can be locked
belongs to a dead server, and the next start removes it. Folders of living servers are left alone.
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
NAME = re.compile(PREFIX + r"\.\d+\.\w+")

MAX_PATH = 100
"""Longest path of a socket, in bytes; the kernel's limit is 107."""

LONGEST_SOCKET = "gateways.sock"


@contextmanager
def instance_folder(parent: Path | None = None) -> Iterator[Path]:
    """Make a folder that only this user may enter, and remove it at the end. Folders of dead servers are removed first.

    It is made in `parent`: by default XDG_RUNTIME_DIR, or the folder for temporary files.
    """
    parent = parent or default_parent()
    remove_dead(parent)
    folder, lock = _create(parent)
    try:
        yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)
        os.close(lock)


def default_parent() -> Path:
    """Return the first folder for short-lived files that can be written and leaves room for a socket's path."""
    candidates = [os.environ.get("XDG_RUNTIME_DIR"), tempfile.gettempdir(), "/tmp"]
    for parent in (Path(path) for path in candidates if path):
        longest = parent / f"{PREFIX}.{2**22}.{'x' * 8}" / LONGEST_SOCKET
        if os.access(parent, os.W_OK | os.X_OK) and len(os.fsencode(longest)) <= MAX_PATH:
            return parent
    raise ConfigError(
        f"there is no writable folder with a short path for sockets among {', '.join(filter(None, candidates))}"
    )


def remove_dead(parent: Path) -> list[Path]:
    """Remove the folders in `parent` whose servers are dead, and return them."""
    return [folder for folder in sorted(parent.glob(f"{PREFIX}.*")) if NAME.fullmatch(folder.name) and _remove(folder)]


def _create(parent: Path) -> tuple[Path, int]:
    while True:
        folder = Path(tempfile.mkdtemp(prefix=f"{PREFIX}.{os.getpid()}.", dir=parent))  # mode 0700
        with suppress(FileNotFoundError):
            lock = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
            fcntl.flock(lock, fcntl.LOCK_EX)
            if folder.exists():  # else another start removed it before it was locked
                return folder, lock
            os.close(lock)


def _remove(folder: Path) -> bool:
    try:
        lock = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
    except OSError:  # another user's, or gone
        return False
    try:
        if os.fstat(lock).st_uid != os.getuid():
            return False
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:  # its server lives
        return False
    else:
        shutil.rmtree(folder, ignore_errors=True)
        return True
    finally:
        os.close(lock)
