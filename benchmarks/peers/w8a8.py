"""Rounds a checkpoint to W8A8: weights of 8 bits with a scale an output.

Whoever serves it rounds activations too, with a scale a token. The result is in the format `int-quantized` of
compressed-tensors, which vLLM reads. As its tools do by default, the embedding and the head stay as they are.
"""

import json
import shutil
from collections.abc import Iterator
from pathlib import Path

import torch
from safetensors.torch import load_file

from benchmarks.peers.random_weights import INDEX, Tensors, write_files

GREATEST = 127
KEPT = ("model.embed_tokens.weight", "lm_head.weight")

QUANTIZATION = {
    "quant_method": "compressed-tensors",
    "format": "int-quantized",
    "quantization_status": "compressed",
    "ignore": ["lm_head"],
    "config_groups": {
        "group_0": {
            "targets": ["Linear"],
            "weights": {"num_bits": 8, "type": "int", "strategy": "channel", "symmetric": True, "dynamic": False},
            "input_activations": {
                "num_bits": 8,
                "type": "int",
                "strategy": "token",
                "symmetric": True,
                "dynamic": True,
            },
        }
    },
}


def write_w8a8(source: Path, target: Path) -> None:
    """Write the checkpoint of folder `source`, rounded, into folder `target`; a file of weights at a time."""
    for path in source.iterdir():
        if path.suffix != ".safetensors" and path.name not in ("config.json", INDEX):
            shutil.copy(path, target)
    config = json.loads((source / "config.json").read_text())
    (target / "config.json").write_text(json.dumps(config | {"quantization_config": QUANTIZATION}, indent=1))
    write_files(target, _rounded_files(source))


def _rounded_files(source: Path) -> Iterator[Tensors]:
    for path in sorted(source.glob("*.safetensors")):
        rounded: Tensors = {}
        for name, weight in load_file(path).items():
            rounded |= {name: weight} if weight.dim() == 1 or name in KEPT else _rounded(name, weight)
        yield rounded


def _rounded(name: str, weight: torch.Tensor) -> Tensors:
    """Return the 8-bit weights (outputs, inputs) and their scales (outputs, 1), under their names in the format."""
    numbers = weight.float()
    scale = numbers.abs().amax(dim=1, keepdim=True).clamp(min=torch.finfo(torch.float32).tiny) / GREATEST
    return {name: (numbers / scale).round().to(torch.int8), f"{name}_scale": scale}
