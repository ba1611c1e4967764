"""Makes a model folder for a GGUF file: config and tokenizer files made from its header, and a pointer to the file.

The folder is in the cache, and its name is a digest of the file's name, size and first bytes. It is made under another
name and then renamed, so that a killed process leaves no incomplete folder. If several services start at the same time,
one makes the folder and the others wait. Weights are not copied: gguf.json has the path of the file. It is rewritten if
the file has moved.
"""

import fcntl
import hashlib
import json
import os
import shutil
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import msgspec
from msgspec import Struct

from shared.errors import ModelError
from shared.gguf.damage import damage_as_model_error
from shared.gguf.parts import find_parts

FORMAT = 2
"""The version of the folder's content. Increase it with every change of the content: older folders are then remade."""

POINTER = "gguf.json"
CONFIG_FILES = ("config.json", "generation_config.json", "tokenizer_config.json")
TOKENIZER_FILE = "tokenizer.json"
DIGEST_BYTES = 8 * 1024 * 1024  # the size of a large header: a vocabulary takes some megabytes


class Pointer(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The content of gguf.json, which says what a folder was made from."""

    format: int
    files: list[str]  # absolute paths, the first one with the header
    no_tokenizer: str = ""  # why the folder has none


def model_folder(file: Path, cache: Path, sampling: Mapping[str, Any] | None = None) -> Path:
    """Return the model folder in `cache` for a GGUF file, or for the split model that it is part of. Make it if needed.

    `sampling` goes into generation_config.json, since GGUF has no sampling defaults. Raise `ModelError` if the file is
    missing, damaged or not supported, naming what is wrong.
    """
    with damage_as_model_error(file):
        return _find_or_make(find_parts(file.absolute()), cache, dict(sampling or {}))


def _find_or_make(parts: tuple[Path, ...], cache: Path, sampling: Mapping[str, Any]) -> Path:
    target = cache / _digest(parts, sampling)
    paths = [str(part) for part in parts]
    if (pointer := _read_complete(target)) and pointer.files == paths:
        return target
    try:
        cache.mkdir(parents=True, exist_ok=True)
        with _locked(target.with_name(f".{target.name}.lock")):
            pointer = _read_complete(target)
            if pointer is None:
                _make(parts, target, sampling)
            elif pointer.files != paths:
                _write_pointer(target, msgspec.structs.replace(pointer, files=paths))
    except OSError as error:
        raise ModelError(
            f"cannot put the settings of {parts[0]} into {target}: {error}; QUIRE_CACHE names another place"
        ) from error
    return target


def read_pointer(folder: Path) -> Pointer | None:
    """Return the pointer of a folder that this version made; None if it is no such folder."""
    path = folder / POINTER
    try:
        pointer = msgspec.json.decode(path.read_bytes(), type=Pointer) if path.is_file() else None
    except (OSError, msgspec.DecodeError):
        return None
    return pointer if pointer is not None and pointer.format == FORMAT else None


def display_path(folder: Path) -> Path:
    """Return the path that a user knows: of the GGUF file that the folder was made from, or of the folder itself."""
    pointer = read_pointer(folder)
    return Path(pointer.files[0]) if pointer else folder


def _read_complete(folder: Path) -> Pointer | None:
    """Return the pointer of a folder that has all its files; None if somebody removed one."""
    pointer = read_pointer(folder)
    files = CONFIG_FILES if pointer is None or pointer.no_tokenizer else (*CONFIG_FILES, TOKENIZER_FILE)
    return pointer if all((folder / name).is_file() for name in files) else None


def _digest(parts: tuple[Path, ...], sampling: Mapping[str, Any]) -> str:
    digest = hashlib.sha256(json.dumps(sampling, sort_keys=True).encode())
    for part in parts:
        try:
            with part.open("rb") as file:
                digest.update(f"{part.name} {os.fstat(file.fileno()).st_size}\n".encode())
                digest.update(file.read(DIGEST_BYTES))
        except OSError as error:
            raise ModelError(f"{part} cannot be read: {error}") from error
    return digest.hexdigest()[:32]


def _make(parts: tuple[Path, ...], target: Path, sampling: Mapping[str, Any]) -> None:
    partial, old = target.with_name(f".{target.name}.partial"), target.with_name(f".{target.name}.old")
    for leftover in (partial, old):  # from a process that was killed; the lock keeps others out
        shutil.rmtree(leftover, ignore_errors=True)
    partial.mkdir()
    try:
        _write(parts, partial, sampling)
        if target.exists():
            target.rename(old)
        partial.rename(target)
    finally:
        for leftover in (partial, old):
            shutil.rmtree(leftover, ignore_errors=True)


def _write(parts: tuple[Path, ...], folder: Path, sampling: Mapping[str, Any]) -> None:
    from shared.gguf.config import model_config  # imports the gguf package, only to make a folder
    from shared.gguf.header import read_header
    from shared.gguf.tensors import find_tensors
    from shared.gguf.tokenizer import Unconvertible, build_tokenizer, check_types, end_token_ids, tokenizer_config

    header = read_header(parts[0])
    check_types(header)
    config = model_config(header)
    find_tensors(header, config)  # fails here, at the command line, rather than in a worker
    eos_ids = end_token_ids(header, config["vocab_size"])
    generation = {"eos_token_id": eos_ids[0] if len(eos_ids) == 1 else eos_ids} if eos_ids else {}
    reason = ""
    try:
        tokenizer = build_tokenizer(header.metadata).to_str()
        (folder / TOKENIZER_FILE).write_text(tokenizer, encoding="utf-8")
    except Unconvertible as error:
        reason = f"no tokenizer can be made of {parts[0]}: {error}; name the original one's folder with --tokenizer"
    _write_json(folder / "config.json", config)
    _write_json(folder / "generation_config.json", generation | dict(sampling))
    _write_json(folder / "tokenizer_config.json", tokenizer_config(header.metadata))
    _write_pointer(folder, Pointer(format=FORMAT, files=[str(part) for part in parts], no_tokenizer=reason))


def _write_pointer(folder: Path, pointer: Pointer) -> None:
    partial = folder / f".{POINTER}.{os.getpid()}"
    partial.write_bytes(msgspec.json.encode(pointer))
    partial.replace(folder / POINTER)


def _write_json(path: Path, value: Mapping[str, Any]) -> None:
    path.write_text(json.dumps(value, indent=2, ensure_ascii=False, allow_nan=False) + "\n", encoding="utf-8")


@contextmanager
def _locked(path: Path) -> Iterator[None]:
    with path.open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)  # released when the process ends, however it ends
        yield
