"""Writes a checkpoint of random bfloat16 weights, a file at a time, so that a model need not fit into memory.

Greedy answers of such a model are whole words: rows of other tokens are drawn smaller in embedding and head, so that
these never have the greatest logit. A server that holds characters back until they are complete would otherwise seem
slow to begin, and one that does not count its tokens could not be counted by its text.
"""

import json
import re
from collections.abc import Iterable, Iterator
from itertools import chain
from pathlib import Path

import torch
from safetensors.torch import save_file

from benchmarks.peers.models import Shape

LAYERS_PER_FILE = 4
INDEX = "model.safetensors.index.json"
DEVIATION = 0.02
OTHERS = 0.25  # of the deviation, for rows of tokens that are not words
WORD = re.compile(r"Ġ[A-Za-z]+")  # as byte-level vocabularies write a space and letters

Tensors = dict[str, torch.Tensor]


def write_random(shape: Shape, tokenizer: Path, folder: Path, seed: int = 0) -> None:
    """Write config.json and the weights of `shape` into `folder`. `tokenizer` is a tokenizer.json."""
    (folder / "config.json").write_text(json.dumps(shape.config(), indent=1))
    random = torch.Generator().manual_seed(seed)
    write_files(folder, _files(shape, _words(tokenizer, shape.vocabulary), random))


def write_files(folder: Path, files: Iterable[Tensors]) -> None:
    """Write each of `files` as a safetensors file, and their index. Only one of them is in memory at a time."""
    places: dict[str, str] = {}
    size = 0
    for number, tensors in enumerate(files):
        name = f"model-{number + 1:05}.safetensors"
        save_file(tensors, folder / name, {"format": "pt"})
        places |= dict.fromkeys(tensors, name)
        size += sum(tensor.nbytes for tensor in tensors.values())
    index = {"metadata": {"total_size": size}, "weight_map": places}
    (folder / INDEX).write_text(json.dumps(index, indent=1))


def _files(shape: Shape, words: torch.Tensor, random: torch.Generator) -> Iterator[Tensors]:
    yield {name: _drawn(size, random, words) for name, size in shape.ends()}
    for first in range(0, shape.layers, LAYERS_PER_FILE):
        layers = range(first, min(first + LAYERS_PER_FILE, shape.layers))
        named = chain.from_iterable(shape.layer(number) for number in layers)
        yield {name: _drawn(size, random) for name, size in named}


def _drawn(size: tuple[int, ...], random: torch.Generator, words: torch.Tensor | None = None) -> torch.Tensor:
    """Return a tensor: ones for a norm, normal numbers for a matrix, whose rows outside `words` are smaller."""
    if len(size) == 1:
        return torch.ones(size, dtype=torch.bfloat16)
    drawn = torch.empty(size, dtype=torch.float32).normal_(0, DEVIATION, generator=random)
    if words is not None:
        drawn[~words] *= OTHERS
    return drawn.to(torch.bfloat16)


def _words(tokenizer: Path, vocabulary: int) -> torch.Tensor:
    """Return, for each token, whether it is a space and letters."""
    is_word = torch.zeros(vocabulary, dtype=torch.bool)
    for text, id in json.loads(tokenizer.read_text(encoding="utf-8"))["model"]["vocab"].items():
        is_word[id] = WORD.fullmatch(text) is not None
    return is_word
