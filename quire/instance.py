"""The private folder of one running server: ipc sockets live in it, and it vanishes with the server.

The folder is held by a lock on the folder itself, which the kernel drops however the server ends. A folder that can
be locked therefore belongs to nobody any more, and the next start removes it; those of living servers are left alone.
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
"""Of a socket's path, in bytes; the kernel's limit is 107."""

LONGEST_SOCKET = "gateways.sock"


@contextmanager
def instance_folder(place: Path | None = None) -> Iterator[Path]:
    """A new folder that only this user may enter, removed at the end; those that dead servers left go first.

    It is made in `place`: by default XDG_RUNTIME_DIR, or the folder for temporary files.
    """
    place = place or default_place()
    reclaim(place)
    folder, lock = _create(place)
    try:
        yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)
        os.close(lock)


def default_place() -> Path:
    """The first folder for short-lived files that can be written and leaves room for a socket's path."""
    wished = [os.environ.get("XDG_RUNTIME_DIR"), tempfile.gettempdir(), "/tmp"]
    for place in (Path(path) for path in wished if path):
        longest = place / f"{PREFIX}.{2**22}.{'x' * 8}" / LONGEST_SOCKET
        if os.access(place, os.W_OK | os.X_OK) and len(os.fsencode(longest)) <= MAX_PATH:
            return place
    raise ConfigError(
        f"there is no writable folder with a short path for sockets among {', '.join(filter(None, wished))}"
    )


def reclaim(place: Path) -> list[Path]:
    """Remove the folders in `place` whose servers are dead, and return them."""
    return [folder for folder in sorted(place.glob(f"{PREFIX}.*")) if NAME.fullmatch(folder.name) and _remove(folder)]


def _create(place: Path) -> tuple[Path, int]:
    while True:
        folder = Path(tempfile.mkdtemp(prefix=f"{PREFIX}.{os.getpid()}.", dir=place))  # mode 0700
        with suppress(FileNotFoundError):
            lock = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
            fcntl.flock(lock, fcntl.LOCK_EX)
            if folder.exists():  # else another start took it for a dead one's before it was locked
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
