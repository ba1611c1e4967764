"""`ModelFolder`: the configs of a model folder, read once; and `find_weights`: the choice of its weight files.

Folders also hold backups, other formats of the same weights, and leftovers of earlier versions. The choice is the same
as in transformers: safetensors before pickles, a single file before an index. This module reads no tensors and imports
no torch, since the command line uses it before anything starts.
"""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Literal, NamedTuple

import msgspec

from services.worker.checkpoint.config_json import ConfigJson
from services.worker.checkpoint.quantization_config import (
    MARKER_FILES,
    SETTINGS_FILES,
    QuantizationConfig,
    read_quantization,
)
from shared.errors import ModelError
from shared.gguf.folder import read_pointer

WeightFormat = Literal["auto", "safetensors", "pt", "gguf"]

_CONFIG = "config.json"
_FILES = {"safetensors": "model.safetensors", "pt": "pytorch_model.bin"}
_ONLY_FILES = {"safetensors": "*.safetensors", "pt": "*.pt"}  # SqueezeLLM's tool writes the latter


class ModelFolder(NamedTuple):
    """The configs of a model folder."""

    path: Path
    config: ConfigJson
    quantization: QuantizationConfig | None  # from config.json, or from a file beside it
    settings: Mapping[str, bytes]  # the bytes of config.json and of quantisation tools' files, by file name

    @classmethod
    def read(cls, path: Path) -> "ModelFolder":
        """Read the folder at `path`. Raise ModelError, naming it, if a file is broken or the weights are quantised in
        a way that is not supported.
        """
        settings = {_CONFIG: _read_config(path)}
        config = _parse_config(path / _CONFIG, settings[_CONFIG])
        try:
            names = [name for name in (*MARKER_FILES, *SETTINGS_FILES) if (path / name).exists()]
            settings |= {name: _read_settings(path / name) for name in names}
            return cls(path, config, read_quantization(config, settings), settings)
        except ModelError as error:
            raise ModelError(f"{path}: {error}") from error


def _read_config(folder: Path) -> bytes:
    path = folder / _CONFIG
    try:
        if not path.exists():
            raise ModelError(f"{path} does not exist: {folder} is not a model folder")
        return _read_file(path)
    except OSError as error:
        raise ModelError(f"{path}: {error}") from error


def _parse_config(path: Path, content: bytes) -> ConfigJson:
    """Parse with Python's own module, as transformers does: `Infinity`, `NaN` and numbers of any size are taken.

    A field that a family reads is checked where it is read.
    """
    try:
        config = json.loads(content.decode("utf-8"))
    except (ValueError, RecursionError) as error:
        raise ModelError(f"{path}: {error}") from error
    if not isinstance(config, dict):
        raise ModelError(f"{path}: must hold an object")
    return ConfigJson(config)


def _read_settings(path: Path) -> bytes:
    try:
        return _read_file(path)
    except OSError as error:
        raise ModelError(f"{path.name}: {error}") from error


def _read_file(path: Path) -> bytes:
    if not path.is_file():  # a pipe would be waited for
        raise OSError("it is no file")
    return path.read_bytes()


def find_weights(folder: Path, requested: WeightFormat) -> tuple[str, list[Path]]:
    """Return (format, files) of the weights of a model folder. Raise ModelError if there are none."""
    if requested in ("auto", "gguf") and (pointer := read_pointer(folder)):
        return "gguf", [Path(path) for path in pointer.files]
    if requested == "gguf":
        raise ModelError(f"{folder} was not made of a GGUF file; name the .gguf file itself as the model")
    formats = _FILES if requested == "auto" else {requested: _FILES[requested]}
    for format, name in formats.items():
        single, index = folder / name, _index(folder / name)
        if single.is_file() and single not in _listed_if_readable(index):
            return format, [single]
        if index.is_file():
            return format, _check_shards(index)
    for format, pattern in _ONLY_FILES.items():
        others = [path for path in folder.glob(pattern) if path.is_file()] if format in formats else []
        if len(others) == 1:  # under another name, but it is the only one
            return format, others
    raise ModelError(f"{folder}: no weights; none of {', '.join(formats.values())} or their .index.json is there")


def ignored_index(paths: list[Path]) -> Path | None:
    """Return the index beside the single file in `paths` if it lists other files: one of the two is a leftover."""
    index = _index(paths[0])
    return index if index.is_file() and _listed_if_readable(index) != paths else None


def _index(file: Path) -> Path:
    return file.with_name(f"{file.name}.index.json")


def _listed_if_readable(index: Path) -> list[Path]:
    try:
        return _listed(index) if index.is_file() else []
    except ModelError:
        return []


def _check_shards(index: Path) -> list[Path]:
    """Return the files that an index lists. Raise ModelError naming one that is missing."""
    paths = _listed(index)
    if not paths:
        raise ModelError(f"{index}: it lists no files")
    for path in paths:
        if not path.is_file():
            raise ModelError(f"{path} is missing; {index.name} lists it")
    return paths


def _listed(index: Path) -> list[Path]:
    try:
        content = msgspec.json.decode(index.read_bytes(), type=dict[str, object])
        files = msgspec.convert(content.get("weight_map"), dict[str, str])
    except (OSError, msgspec.DecodeError, RecursionError) as error:
        raise ModelError(f"{index}: {error}") from error
    return [index.parent / name for name in dict.fromkeys(files.values())]
