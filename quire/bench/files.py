"""Reads prompts from files: ShareGPT's JSON, or the user's own JSON lines.

An error in the user's own file is a `ConfigError`, and so is any file that cannot be read. ShareGPT's files were
written by many programs, so an entry that cannot be used is skipped and counted.
"""

import codecs
import itertools
import json
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import msgspec
from msgspec import Struct

from shared.errors import ConfigError

TURNS_FIELDS = ("conversations", "conversation", "messages", "items")
ROLE_FIELDS = ("from", "role")
TEXT_FIELDS = ("value", "content", "text")
"""Names of the same field in different files, the most usual first."""

ROLES = {
    "human": "user",
    "user": "user",
    "gpt": "assistant",
    "assistant": "assistant",
    "chatgpt": "assistant",
    "bing": "assistant",
    "bard": "assistant",
    "bot": "assistant",
    "model": "assistant",
    "system": "system",
    "developer": "system",
}


class Entry(NamedTuple):
    """A prompt from a file."""

    prompt: str
    answer: str | None  # the assistant's answer in a conversation
    output_tokens: int | None  # the number that its line asks for


class _Line(Struct):
    prompt: str
    output_tokens: int | None = None


class _Turn(NamedTuple):
    role: str | None  # None if the file does not say
    text: str


def sharegpt(path: str | None) -> list[Entry]:
    """Return the first question with an answer of each conversation, and count those without one on stderr."""
    try:
        conversations = json.loads(_read("sharegpt", path))  # unlike msgspec, it accepts NaN and half surrogate pairs
    except (ValueError, RecursionError) as error:
        raise ConfigError(f"--dataset-path {path}: not ShareGPT's JSON: {error}") from error
    if not isinstance(conversations, list):
        raise ConfigError(f"--dataset-path {path}: not ShareGPT's JSON: it must be a list of conversations")
    exchanges = [_first_exchange(conversation) for conversation in conversations]
    entries = [entry for entry in exchanges if entry is not None]
    if skipped := len(exchanges) - len(entries):
        print(
            f"quire: {path}: skipped {skipped} of {len(exchanges)} entries, which hold no question with an answer",
            file=sys.stderr,
        )
    return entries


def custom(path: str | None) -> Iterator[Entry]:
    """Yield a prompt for each line, with the number of output tokens if the line has one."""
    for number, line in enumerate(_read("custom", path).splitlines(), 1):
        if not line.strip():
            continue
        try:
            fields = msgspec.json.decode(line, type=_Line)
        except msgspec.DecodeError as error:
            raise ConfigError(f"--dataset-path {path}, line {number}: {error}") from error
        yield Entry(fields.prompt, None, fields.output_tokens)


def _first_exchange(conversation: Any) -> Entry | None:
    """Return the first turn of a user that the assistant answers, and the answer; None if there is none.

    If no turn has the assistant's role, the roles are unknown, and the first two turns are used.
    """
    turns = [turn for turn in _turns(conversation) if turn is None or turn.role != "system"]
    has_roles = any(turn is not None and turn.role == "assistant" for turn in turns)
    pairs = itertools.pairwise(turns) if has_roles else [turns[:2]] if len(turns) >= 2 else []
    for question, answer in pairs:
        if question is None or answer is None:
            continue
        if not has_roles or (question.role, answer.role) == ("user", "assistant"):
            return Entry(question.text, answer.text, None)
    return None


def _turns(conversation: Any) -> list[_Turn | None]:
    """Return the turns of a conversation, None for each that cannot be read."""
    fields = conversation if isinstance(conversation, dict) else {}
    lists = [turns for turns in (conversation, *map(fields.get, TURNS_FIELDS)) if isinstance(turns, list)]
    return [_turn(turn) for turn in lists[0]] if lists else []


def _turn(turn: Any) -> _Turn | None:
    if not isinstance(turn, dict):
        return None
    text, role = _first(turn, TEXT_FIELDS), _first(turn, ROLE_FIELDS)
    if text is None or not text.strip() or not _is_unicode(text):
        return _Turn("system", "") if role is not None and ROLES.get(role.lower()) == "system" else None
    return _Turn(role and ROLES.get(role.lower(), role.lower()), text)


def _first(turn: dict[str, Any], names: Sequence[str]) -> str | None:
    return next((turn[name] for name in names if isinstance(turn.get(name), str)), None)


def _is_unicode(text: str) -> bool:
    """Return whether `text` can be encoded: half of a surrogate pair cannot."""
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True


def _read(dataset: str, path: str | None) -> bytes:
    """Return the content of the file without a byte order mark. Raise `ConfigError`."""
    if path is None:
        raise ConfigError(f"--dataset-name {dataset} needs --dataset-path")
    try:
        return Path(path).read_bytes().removeprefix(codecs.BOM_UTF8)
    except OSError as error:
        raise ConfigError(f"--dataset-path {path}: {error.strerror or error}") from error
