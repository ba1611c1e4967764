"""Which files of a model folder hold its weights.

Folders also hold backups, other formats of the same weights, and leftovers of earlier versions. The choice is that of
transformers: safetensors before pickles, a single file before an index. No file's tensors are looked at, and torch is
not imported, so that the command line can ask before anything starts.
"""

from pathlib import Path
from typing import Literal

import msgspec

from shared.errors import ModelError
from shared.gguf.folder import read_pointer

Format = Literal["auto", "safetensors", "pt", "gguf"]

_FILES = {"safetensors": "model.safetensors", "pt": "pytorch_model.bin"}


def find_weights(folder: Path, wanted: Format) -> tuple[str, list[Path]]:
    """Return (format, files) of the weights of a model folder. Raises `ModelError` if there are none."""
    if wanted in ("auto", "gguf") and (pointer := read_pointer(folder)):
        return "gguf", [Path(path) for path in pointer.files]
    if wanted == "gguf":
        raise ModelError(f"{folder} was not made of a GGUF file; name the .gguf file itself as the model")
    kinds = _FILES if wanted == "auto" else {wanted: _FILES[wanted]}
    for kind, name in kinds.items():
        single, index = folder / name, _index(folder / name)
        if single.exists() and single not in _listed(index):
            return kind, [single]
        if index.exists():
            return kind, _of_index(index)
    lone = list(folder.glob("*.safetensors")) if "safetensors" in kinds else []
    if len(lone) == 1:  # under a name of its own, but there is no mistaking it
        return "safetensors", lone
    raise ModelError(f"{folder}: no weights; none of {', '.join(kinds.values())} or their .index.json is there")


def index_passed_over(paths: list[Path]) -> Path | None:
    """Return the index beside a single file that is taken, if it lists others: then one of the two is a leftover."""
    index = _index(paths[0])
    return index if index.exists() and _listed(index) != paths else None


def _index(file: Path) -> Path:
    return file.with_name(f"{file.name}.index.json")


def _listed(index: Path) -> list[Path]:
    """Return the files that an index names, or nothing if it cannot be read."""
    try:
        return _read(index)
    except ModelError:
        return []


def _of_index(index: Path) -> list[Path]:
    paths = _read(index)
    for path in paths:
        if not path.exists():
            raise ModelError(f"{path} is missing; {index.name} lists it")
    return paths


def _read(index: Path) -> list[Path]:
    try:
        read = msgspec.json.decode(index.read_bytes(), type=dict[str, object])
        names = msgspec.convert(read.get("weight_map"), dict[str, str])
    except (OSError, msgspec.DecodeError) as error:
        raise ModelError(f"{index}: {error}") from error
    return [index.parent / name for name in dict.fromkeys(names.values())]
