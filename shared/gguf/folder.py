"""A GGUF file as a model folder: what its header says, as the files that every other part reads, and a pointer to it.

The folder lies in the cache under a digest of the file's name, size and first bytes, wherever the file is. It appears
by a rename, so it is there in whole or not at all, whatever is killed when; services that start at the same time wait
for the first one's work. Weights are not copied: gguf.json says where they lie, and is written anew, by a rename
too, when the file has moved.
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
from shared.gguf.damage import blamed_on
from shared.gguf.parts import find_parts

FORMAT = 2
"""Of the folder; raised when what is written changes, so that older folders are made anew."""

POINTER = "gguf.json"
SETTINGS = ("config.json", "generation_config.json", "tokenizer_config.json")
TOKENIZER = "tokenizer.json"
HEAD = 8 * 1024 * 1024  # bytes that tell files apart; headers with their vocabularies are some megabytes


class Pointer(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What a folder says of its origin."""

    format: int
    files: list[str]  # absolute paths, the first one with the header
    no_tokenizer: str = ""  # why the folder has none


def model_folder(file: Path, cache: Path, sampling: Mapping[str, Any] | None = None) -> Path:
    """The folder, in `cache`, of the model in a GGUF file, or in a split set of which it is one; made if need be.

    GGUF says nothing of how a model likes to be sampled; `sampling` goes into generation_config.json. Raises
    `ModelError` for a file that is missing, damaged or not supported, naming what is wrong.
    """
    with blamed_on(file):
        return _find_or_make(find_parts(file.absolute()), cache, dict(sampling or {}))


def _find_or_make(parts: tuple[Path, ...], cache: Path, sampling: Mapping[str, Any]) -> Path:
    target = cache / _digest(parts, sampling)
    wanted = [str(part) for part in parts]
    if (found := _whole(target)) and found.files == wanted:
        return target
    try:
        cache.mkdir(parents=True, exist_ok=True)
        with _only_one(target.with_name(f".{target.name}.lock")):
            found = _whole(target)
            if found is None:
                _make(parts, target, sampling)
            elif found.files != wanted:
                _write_pointer(target, msgspec.structs.replace(found, files=wanted))
    except OSError as error:
        raise ModelError(
            f"cannot put the settings of {parts[0]} into {target}: {error}; QUIRE_CACHE names another place"
        ) from error
    return target


def read_pointer(folder: Path) -> Pointer | None:
    """Where the weights of a folder that this version made are; None if it is no such folder."""
    try:
        found = msgspec.json.decode((folder / POINTER).read_bytes(), type=Pointer)
    except (OSError, msgspec.DecodeError):
        return None
    return found if found.format == FORMAT else None


def origin(folder: Path) -> Path:
    """What a user knows of a folder: the GGUF file that it was made of, if it was made of one."""
    pointer = read_pointer(folder)
    return Path(pointer.files[0]) if pointer else folder


def _whole(folder: Path) -> Pointer | None:
    """As `read_pointer`, of a folder from which nobody has taken a file."""
    found = read_pointer(folder)
    files = SETTINGS if found is None or found.no_tokenizer else (*SETTINGS, TOKENIZER)
    return found if all((folder / name).is_file() for name in files) else None


def _digest(parts: tuple[Path, ...], sampling: Mapping[str, Any]) -> str:
    digest = hashlib.sha256(json.dumps(sampling, sort_keys=True).encode())
    for part in parts:
        try:
            with part.open("rb") as file:
                digest.update(f"{part.name} {os.fstat(file.fileno()).st_size}\n".encode())
                digest.update(file.read(HEAD))
        except OSError as error:
            raise ModelError(f"{part} cannot be read: {error}") from error
    return digest.hexdigest()[:32]


def _make(parts: tuple[Path, ...], target: Path, sampling: Mapping[str, Any]) -> None:
    partial, old = target.with_name(f".{target.name}.partial"), target.with_name(f".{target.name}.old")
    for leftover in (partial, old):  # of a start that was killed: nobody else can be here
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
    from shared.gguf.config import model_config  # with the gguf package; not needed where the folder is there
    from shared.gguf.header import read_header
    from shared.gguf.tensors import find_sources
    from shared.gguf.tokenizer import Unconvertible, build_tokenizer, check_kinds, end_token_ids, tokenizer_config

    header = read_header(parts[0])
    check_kinds(header)
    config = model_config(header)
    find_sources(header, config)  # now, when the user looks, and not in a worker's log
    ends = end_token_ids(header, config["vocab_size"])
    generation = {"eos_token_id": ends[0] if len(ends) == 1 else ends} if ends else {}
    reason = ""
    try:
        tokenizer = build_tokenizer(header.metadata).to_str()
        (folder / TOKENIZER).write_text(tokenizer, encoding="utf-8")
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
def _only_one(path: Path) -> Iterator[None]:
    with path.open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)  # falls with the process, however it ends
        yield
