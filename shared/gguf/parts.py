"""The files of one model: a GGUF file, or the numbered parts that a large one was split into."""

import re
from pathlib import Path

from shared.errors import ModelError

PART = re.compile(r"(?P<stem>.*)-(?P<number>\d{5})-of-(?P<count>\d{5})\.gguf")


def find_parts(path: Path) -> tuple[Path, ...]:
    """The files of the model that `path` is, or is a part of. Raises `ModelError` naming one that is missing."""
    found = PART.fullmatch(path.name)
    count = int(found["count"]) if found else 1
    names = [f"{found['stem']}-{at:05}-of-{count:05}.gguf" for at in range(1, count + 1)] if found else [path.name]
    paths = tuple(path.with_name(name) for name in names)
    for part in paths:
        if not part.is_file():
            of_set = f" (it is one of the {count} files of this model)" if found else ""
            raise ModelError(f"there is no file {part}{of_set}")
    return paths
