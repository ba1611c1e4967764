"""Tests the checkpoints that `make bench-peers` makes: random weights, and their rounding to W8A8."""

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

from benchmarks.peers.checkpoint import bfloat16, count_weights, made_once, w8a8
from benchmarks.peers.models import MIDDLE, Model, Shape
from benchmarks.peers.random_weights import INDEX
from benchmarks.peers.w8a8 import KEPT
from shared.hub.checkpoint import locate
from shared.text.tokenizer import Tokenizer

TIED = Model("tied", "a tiny Llama", Shape(64, 6, 4, 2, 16, 96, vocabulary=49152, tied=True))
UNTIED = Model("untied", "a tiny Llama", TIED.shape._replace(tied=False) if TIED.shape else None)


def _tensors(folder: Path) -> dict[str, torch.Tensor]:
    """Return all tensors of a checkpoint, each from the file that the index names."""
    places = json.loads((folder / INDEX).read_text())["weight_map"]
    files = {name: load_file(folder / name) for name in set(places.values())}
    assert {name for file in files.values() for name in file} == set(places)
    return {name: files[place][name] for name, place in places.items()}


@pytest.mark.parametrize("model", [TIED, UNTIED], ids=lambda model: model.key)
def test_transformers_load_all_tensors_of_a_random_model(model: Model, tmp_path: Path) -> None:
    loaded, report = AutoModelForCausalLM.from_pretrained(bfloat16(tmp_path, model), output_loading_info=True)
    assert not report["missing_keys"]
    assert not report["unexpected_keys"]
    assert not report["mismatched_keys"]
    parameters = {name: parameter for name, parameter in loaded.named_parameters() if parameter.dim() == 2}
    layers = sum(parameter.numel() for name, parameter in parameters.items() if ".layers." in name)
    assert count_weights(bfloat16(tmp_path, model)) == (layers, 49152 * 64)


def test_the_shape_of_the_middle_model_is_of_1_07_billion_weights() -> None:
    assert MIDDLE.shape is not None
    sizes = [size for number in range(MIDDLE.shape.layers) for _, size in MIDDLE.shape.layer(number)]
    sizes += [size for _, size in MIDDLE.shape.ends()]
    assert sum(size[0] * size[-1] for size in sizes if len(size) == 2) == 1_073_741_824


def test_greedy_answers_of_a_random_model_are_words(tmp_path: Path) -> None:
    """Else servers that hold incomplete characters back would be late by their text alone (TXT-02)."""
    folder = bfloat16(tmp_path, TIED)
    tokenizer = Tokenizer.load(locate(""))
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    with torch.inference_mode():
        best = model(torch.randint(3, 49152, (4, 64), generator=torch.Generator().manual_seed(1))).logits.argmax(-1)
    for tokens in best.tolist():
        text = tokenizer.decode(tokens)
        assert text.replace(" ", "").isascii()
        assert text.replace(" ", "").isalpha()
        assert tokenizer.encode(text) == tokens


def test_rounding_keeps_each_weight_within_half_a_step_of_its_output(tmp_path: Path) -> None:
    original, rounded = _tensors(bfloat16(tmp_path, UNTIED)), _tensors(w8a8(tmp_path, UNTIED))
    for name, weight in original.items():
        if weight.dim() == 1 or name in KEPT:
            assert torch.equal(rounded[name], weight)
            continue
        scale = rounded[f"{name}_scale"]
        assert rounded[name].dtype == torch.int8
        assert scale.shape == (len(weight), 1)
        assert (rounded[name].abs().amax(1) == 127).all()
        assert ((rounded[name] * scale - weight.float()).abs() <= 0.5001 * scale).all()
    scales = {name for name in rounded if name.endswith("_scale")}
    assert len(rounded) == len(original) + len(scales)
    assert len(scales) == 7 * 6


def test_the_rounded_checkpoint_says_how_it_is_read(tmp_path: Path) -> None:
    before = json.loads((bfloat16(tmp_path, TIED) / "config.json").read_text())
    after = json.loads((w8a8(tmp_path, TIED) / "config.json").read_text())
    quantization = after.pop("quantization_config")
    assert after == before
    assert quantization["format"] == "int-quantized"
    group = quantization["config_groups"]["group_0"]
    assert (group["weights"]["strategy"], group["input_activations"]["strategy"]) == ("channel", "token")
    assert (w8a8(tmp_path, TIED) / "tokenizer.json").exists()


def test_an_interrupted_file_is_made_anew_and_a_whole_one_is_not(tmp_path: Path) -> None:
    target = tmp_path / "folder" / "file"

    def broken(path: Path) -> None:
        path.mkdir()
        (path / "half").touch()
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        made_once(target, broken)
    assert not target.exists()
    assert made_once(target, lambda path: path.write_text("whole")).read_text() == "whole"
    assert made_once(target, broken).read_text() == "whole"
