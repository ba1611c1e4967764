"""The files of one model: a GGUF file, or the numbered parts into which a large one was split."""

import os
import re
from pathlib import Path

from shared.errors import ModelError

PART_NAME = re.compile(r"(?P<stem>.*)-(?P<number>\d{5})-of-(?P<count>\d{5})(?P<suffix>\.(?i:gguf))", re.DOTALL)
GGUF_GLOB = "*.[gG][gG][uU][fF]"


def is_gguf(name: str) -> bool:
    """Return whether a file of this name is a GGUF file."""
    return name.lower().endswith(".gguf")


def find_parts(path: Path) -> tuple[Path, ...]:
    """Return all files of the model that `path` belongs to. Raise `ModelError` naming a file that is missing."""
    try:
        str(path).encode()
    except UnicodeEncodeError as error:
        raise ModelError(f"{os.fsencode(path)!r}: this path is not UTF-8; rename the file or its folder") from error
    match = PART_NAME.fullmatch(path.name)
    count = int(match["count"]) if match else 1
    if match and not 1 <= int(match["number"]) <= count:
        raise ModelError(f"{path}: its name says that it is part {match['number']} of {match['count']}; rename it")
    names = [f"{match['stem']}-{at:05}-of-{count:05}{match['suffix']}" for at in range(1, count + 1)] if match else []
    paths = tuple(path.with_name(name) for name in names or [path.name])
    for part in paths:
        if not part.is_file():
            of_set = f" (it is one of the {count} files of this model)" if match else ""
            raise ModelError(f"there is no file {part}{of_set}")
    return paths
