"""The files of one model: a GGUF file, or the numbered parts that a large one was split into."""

import os
import re
from pathlib import Path

from shared.errors import ModelError

PART = re.compile(r"(?P<stem>.*)-(?P<number>\d{5})-of-(?P<count>\d{5})(?P<suffix>\.(?i:gguf))", re.DOTALL)
FILES = "*.[gG][gG][uU][fF]"
"""Of a folder, for `glob`."""


def is_gguf(name: str) -> bool:
    """Whether a file of this name is a GGUF file."""
    return name.lower().endswith(".gguf")


def find_parts(path: Path) -> tuple[Path, ...]:
    """The files of the model that `path` is, or is a part of. Raises `ModelError` naming one that is missing."""
    try:
        str(path).encode()
    except UnicodeEncodeError as error:
        raise ModelError(f"{os.fsencode(path)!r}: this path is not UTF-8; rename the file or its folder") from error
    found = PART.fullmatch(path.name)
    count = int(found["count"]) if found else 1
    if found and not 1 <= int(found["number"]) <= count:
        raise ModelError(f"{path}: its name says that it is part {found['number']} of {found['count']}; rename it")
    names = [f"{found['stem']}-{at:05}-of-{count:05}{found['suffix']}" for at in range(1, count + 1)] if found else []
    paths = tuple(path.with_name(name) for name in names or [path.name])
    for part in paths:
        if not part.is_file():
            of_set = f" (it is one of the {count} files of this model)" if found else ""
            raise ModelError(f"there is no file {part}{of_set}")
    return paths
