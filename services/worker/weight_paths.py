"""Which files of a model folder hold its weights.

With an index, its files are taken and no others: folders also hold backups and other formats of the same weights.
No file's tensors are looked at, and torch is not imported, so that the command line can ask before anything starts.
"""

from pathlib import Path
from typing import Literal

import msgspec

from shared.errors import ModelError
from shared.gguf.folder import read_pointer

Format = Literal["auto", "safetensors", "pt", "gguf"]

_FILES = {"safetensors": "model.safetensors", "pt": "pytorch_model.bin"}


def find_weights(folder: Path, wanted: Format) -> tuple[str, list[Path]]:
    """(format, files): those of an index before a single file, safetensors before pickles. Raises `ModelError`."""
    if wanted in ("auto", "gguf") and (pointer := read_pointer(folder)):
        return "gguf", [Path(path) for path in pointer.files]
    if wanted == "gguf":
        raise ModelError(f"{folder} was not made of a GGUF file; name the .gguf file itself as the model")
    kinds = _FILES if wanted == "auto" else {wanted: _FILES[wanted]}
    for kind, name in kinds.items():
        index = folder / f"{name}.index.json"
        if index.exists():
            return kind, _of_index(index)
        if (folder / name).exists():
            return kind, [folder / name]
    lone = list(folder.glob("*.safetensors")) if "safetensors" in kinds else []
    if len(lone) == 1:  # under a name of its own, but there is no mistaking it
        return "safetensors", lone
    raise ModelError(f"{folder}: no weights; none of {', '.join(kinds.values())} or their .index.json is there")


def _of_index(index: Path) -> list[Path]:
    try:
        read = msgspec.json.decode(index.read_bytes(), type=dict[str, object])
        names = msgspec.convert(read.get("weight_map"), dict[str, str])
    except (OSError, msgspec.DecodeError) as error:
        raise ModelError(f"{index}: {error}") from error
    paths = [index.parent / name for name in dict.fromkeys(names.values())]
    for path in paths:
        if not path.exists():
            raise ModelError(f"{path} is missing; {index.name} lists it")
    return paths
