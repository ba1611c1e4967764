"""Prompts out of files: ShareGPT's JSON, or JSON lines of one's own. Whatever is wrong is a `ConfigError`."""

from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import msgspec
from msgspec import Struct

from shared.errors import ConfigError


class Entry(NamedTuple):
    """One prompt of a file."""

    prompt: str
    answer: str | None  # what stands behind it in a conversation
    output_tokens: int | None  # as its line says


class _Turn(Struct):
    value: str


class _Conversation(Struct):
    conversations: list[_Turn] = []


class _Line(Struct):
    prompt: str
    output_tokens: int | None = None


def sharegpt(path: str | None) -> Iterator[Entry]:
    """First question and first answer of each conversation that has both."""
    try:
        entries = msgspec.json.decode(_read("sharegpt", path), type=list[_Conversation])
    except msgspec.DecodeError as error:
        raise ConfigError(f"--dataset-path {path}: not ShareGPT's JSON: {error}") from error
    for entry in entries:
        if len(entry.conversations) >= 2:
            yield Entry(entry.conversations[0].value, entry.conversations[1].value, None)


def custom(path: str | None) -> Iterator[Entry]:
    """A prompt a line, and the number of output tokens if the line has one."""
    for number, line in enumerate(_read("custom", path).splitlines(), 1):
        if not line.strip():
            continue
        try:
            found = msgspec.json.decode(line, type=_Line)
        except msgspec.DecodeError as error:
            raise ConfigError(f"--dataset-path {path}, line {number}: {error}") from error
        yield Entry(found.prompt, None, found.output_tokens)


def _read(dataset: str, path: str | None) -> bytes:
    if path is None:
        raise ConfigError(f"--dataset-name {dataset} needs --dataset-path")
    try:
        return Path(path).read_bytes()
    except OSError as error:
        raise ConfigError(f"--dataset-path {path}: {error.strerror or error}") from error
