"""Makes the folders of weights that peers read, once each, inside the folder of the peers."""

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

from benchmarks.peers.models import Model, Shape
from shared.hub.checkpoint import locate

TEXTS = ("tokenizer.json", "tokenizer_config.json")


class Weights(NamedTuple):
    """How many weights take part in products: of the layers, and of the head."""

    layers: int
    head: int


def folder_of(folder: Path, model: Model) -> Path:
    """Return the folder of all that is made of a model."""
    return folder / "models" / model.key


def made_once(target: Path, make: Callable[[Path], object]) -> Path:
    """Return `target`; if it does not exist, let `make` write it under another name first.

    What was left under that name by an interrupted call is removed.
    """
    if not target.exists():
        partial = target.with_name(f"{target.name}.part")
        shutil.rmtree(partial, ignore_errors=True)
        partial.unlink(missing_ok=True)
        partial.parent.mkdir(parents=True, exist_ok=True)
        make(partial)
        partial.rename(target)
    return target


def bfloat16(folder: Path, model: Model) -> Path:
    """Return the model's Hugging Face folder with bfloat16 weights."""
    return made_once(folder_of(folder, model) / "bfloat16", lambda target: _write_bfloat16(model.shape, target))


def w8a8(folder: Path, model: Model) -> Path:
    """Return the model's Hugging Face folder with weights of 8 bits, in the format of compressed-tensors."""
    from benchmarks.peers.w8a8 import write_w8a8

    source = bfloat16(folder, model)

    def make(target: Path) -> None:
        target.mkdir()
        write_w8a8(source, target)

    return made_once(folder_of(folder, model) / "w8a8", make)


def count_weights(folder: Path) -> Weights:
    """Return the counts of the checkpoint in a folder. A tied head counts as the embedding that it is."""
    from safetensors import safe_open

    counts: dict[str, int] = {}
    for path in folder.glob("*.safetensors"):
        with safe_open(path, "pt") as file:
            for name in file.keys():  # noqa: SIM118 (it is no mapping)
                rows, *columns = file.get_slice(name).get_shape()
                counts[name] = rows * columns[0] if columns else 0
    head = counts.get("lm_head.weight") or counts["model.embed_tokens.weight"]
    return Weights(sum(count for name, count in counts.items() if ".layers." in name), head)


def _write_bfloat16(shape: Shape | None, target: Path) -> None:
    source = locate("")
    target.mkdir()
    for name in TEXTS:
        shutil.copy(source / name, target)
    if shape is None:
        _write_embedded(source, target)
    else:
        from benchmarks.peers.random_weights import write_random

        write_random(shape, source / "tokenizer.json", target)


def _write_embedded(source: Path, target: Path) -> None:
    """Write the embedded model's weights, as the GGUF file has them, in bfloat16."""
    import torch
    from safetensors.torch import save_file

    from services.worker.checkpoint.model_folder import ModelFolder
    from services.worker.checkpoint.weight_files import WeightFiles

    shutil.copy(source / "config.json", target)
    files = WeightFiles(ModelFolder.read(source))
    tensors = {name: files.get(name).to(torch.bfloat16).contiguous() for name in files.names}
    save_file(tensors, target / "model.safetensors", {"format": "pt"})
