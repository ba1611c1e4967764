"""CURVE keys: ZeroMQ's encryption and authentication of connections over tcp.

The scheduler has a key pair, and so has each role of those that connect to it: gateways and workers. They know the
scheduler's public key and encrypt to nobody else. The scheduler knows the public keys of each role and admits no others
to the role's socket. `make_keys` writes a folder for each process, which has what it needs and nothing more:

    scheduler/   scheduler.key_secret, gateways/*.key, workers/*.key
    gateway/     gateway.key_secret, scheduler.key
    worker/      worker.key_secret, scheduler.key

The files have pyzmq's format for certificates. A `.key` is public; a `.key_secret` has both halves of the pair.
"""

import hashlib
import logging
import os
import struct
import tempfile
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TypeVar

import zmq
from msgspec import Struct
from zmq.auth import create_certificates, load_certificate
from zmq.utils import z85

from shared.errors import ConfigError

logger = logging.getLogger(__name__)

SCHEDULER = "scheduler"
ROLES = ("gateway", "worker")
"""Those that connect to a scheduler. Each role has a socket of its own there."""

FLAG = "--zmq-keys"
WAIT = 30.0
"""Seconds that a service waits for the files in its folder, if there is such a folder: they may be made just now."""

KEY_BYTES = 32

K = TypeVar("K")


class ListenerKeys(Struct, frozen=True):
    """A scheduler's keys."""

    public: bytes
    secret: bytes
    admitted: Mapping[str, frozenset[bytes]]  # public keys by role


class ConnectionKeys(Struct, frozen=True):
    """The keys of a process that connects to a scheduler."""

    public: bytes
    secret: bytes
    scheduler: bytes  # its public key


def make_keys(folder: Path) -> list[Path]:
    """Make what is missing in `folder` of the keys of a scheduler, gateways and workers. Return the new files.

    Only the owner can read them. A key pair made anew for a role is admitted beside those that are there already.
    """
    made: list[Path] = []
    mask = os.umask(0o077)
    try:
        scheduler = _make_pair(folder / SCHEDULER, SCHEDULER, made)
        for role in ROLES:
            public = _make_pair(folder / role, role, made)
            _copy(scheduler, folder / role / f"{SCHEDULER}.key", made)
            digest = hashlib.sha256(load_certificate(public)[0]).hexdigest()[:8]
            _copy(public, folder / SCHEDULER / f"{role}s" / f"{role}-{digest}.key", made)
    except OSError as error:
        raise ConfigError(f"cannot make keys in {folder}: {error.strerror}: {error.filename}") from error
    finally:
        os.umask(mask)
    return made


def load_listener_keys(folder: str) -> ListenerKeys | None:
    """Return a scheduler's keys from its folder in `folder`; None if `folder` is empty. Raise `ConfigError`."""

    def read(own: Path) -> ListenerKeys:
        public, secret = _load_pair(own / f"{SCHEDULER}.key_secret")
        return ListenerKeys(public, secret, {role: _load_admitted(own / f"{role}s") for role in ROLES})

    return _load(folder, SCHEDULER, read)


def load_connection_keys(folder: str, role: str) -> ConnectionKeys | None:
    """Return the keys of a gateway or worker from its folder in `folder`; None if `folder` is empty.

    Raise `ConfigError` if they are missing, cannot be read or are no keys.
    """

    def read(own: Path) -> ConnectionKeys:
        public, secret = _load_pair(own / f"{role}.key_secret")
        return ConnectionKeys(public, secret, _load_public(own / f"{SCHEDULER}.key"))

    return _load(folder, role, read)


def _make_pair(folder: Path, name: str, made: list[Path]) -> Path:
    """Make a key pair unless its secret file exists. Return the file with the public key."""
    public, secret = folder / f"{name}.key", folder / f"{name}.key_secret"
    if not secret.exists():
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=folder, prefix=".new-") as new:
            new_public, new_secret = create_certificates(new, name)
            os.replace(new_public, public)
            os.replace(new_secret, secret)  # last, since it says that the pair is complete
        made += [public, secret]
    return public


def _copy(source: Path, target: Path, made: list[Path]) -> None:
    """Copy a public key in one step, unless the target is there and the same."""
    content = source.read_bytes()
    if target.exists() and target.read_bytes() == content:
        return
    target.parent.mkdir(parents=True, exist_ok=True)
    new = target.with_name(f".{target.name}")
    new.write_bytes(content)
    os.replace(new, target)
    made.append(target)


def _load(folder: str, role: str, read: Callable[[Path], K]) -> K | None:
    """Return what `read` returns for the role's folder. Wait for files that are missing while the folder exists."""
    if not folder:
        return None
    own = Path(folder) / role
    deadline = time.monotonic() + WAIT
    waiting = False
    while True:
        try:
            return read(own)
        except FileNotFoundError as error:
            if not own.is_dir() or time.monotonic() > deadline:
                raise ConfigError(f"{FLAG} {folder}: there is no {error.filename}") from error
        except OSError as error:
            raise ConfigError(f"{FLAG} {folder}: {error.strerror}: {error.filename}") from error
        except ValueError as error:
            raise ConfigError(f"{FLAG} {folder}: {error}") from error
        if not waiting:
            logger.info("waiting up to %.0f s for keys in %s (%s)", WAIT, own, FLAG)
            waiting = True
        time.sleep(0.1)


def _load_pair(path: Path) -> tuple[bytes, bytes]:
    """Return the public and the secret key in a file."""
    public, secret = _read(path)
    if secret is None or zmq.curve_public(secret) != public:
        raise ValueError(f"{path} is not a pair of keys")
    return public, secret


def _load_public(path: Path) -> bytes:
    return _read(path)[0]


def _load_admitted(folder: Path) -> frozenset[bytes]:
    """Return the public keys in the `.key` files of a folder, of which there must be one."""
    paths = sorted(path for path in folder.glob("*.key") if not path.name.startswith("."))  # those are being made
    if not paths:
        raise FileNotFoundError(2, "No such file or directory", str(folder / "*.key"))
    return frozenset(_load_public(path) for path in paths)


def _read(path: Path) -> tuple[bytes, bytes | None]:
    """Return the public key in a file, and the secret one if there is one. Raise `OSError`, or `ValueError`."""
    path.open().close()  # its error has the name of the file, unlike that of the next call
    try:
        public, secret = load_certificate(path)
    except ValueError as error:
        raise ValueError(f"{path} has no key") from error
    if not _is_key(public) or (secret is not None and not _is_key(secret)):
        raise ValueError(f"{path} has something that is not a key")
    return public, secret


def _is_key(text: bytes) -> bool:
    """Return whether `text` is a key: 32 bytes in Z85, which take 40 characters."""
    try:
        return len(z85.decode(text)) == KEY_BYTES
    except (KeyError, ValueError, struct.error):  # another character, an incomplete group, or one of too large a value
        return False
