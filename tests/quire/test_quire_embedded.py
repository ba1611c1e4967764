"""Tests the embedded model: its folder has what loaders need, its text is handled right, and its answers make sense."""

import json
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from transformers import AutoTokenizer

from services.worker.checkpoint.model_folder import ModelFolder
from services.worker.checkpoint.weight_files import WeightFiles
from shared.errors import ModelError
from shared.hub import embedded
from shared.hub.checkpoint import cache_folder, locate
from tests.gguf import transformers_reference


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """Return the folder of the real model, in a cache for these tests."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("QUIRE_CACHE", str(tmp_path_factory.mktemp("cache")))
        yield locate("")


def test_transformers_reads_the_same_tensors_and_the_model_makes_sense(folder: Path) -> None:
    described, theirs = transformers_reference.read(embedded.embedded_file(), folder)
    config = json.loads((folder / "config.json").read_bytes())
    for name in ("hidden_size", "num_attention_heads", "num_key_value_heads", "vocab_size", "max_position_embeddings"):
        assert config[name] == described[name]
    files = WeightFiles(ModelFolder.read(folder))
    assert set(files.names) == set(theirs)
    for name, tensor in theirs.items():
        assert torch.equal(files.get(name), tensor), name
    model = transformers_reference.from_tensors(folder, theirs)
    tokenizer = AutoTokenizer.from_pretrained(folder)
    messages = [{"role": "user", "content": "What is the capital of France?"}]
    inputs = tokenizer.apply_chat_template(messages, add_generation_prompt=True, return_tensors="pt", return_dict=True)
    output = model.generate(**inputs, max_new_tokens=12, do_sample=False)[0, inputs["input_ids"].shape[1] :]
    assert tokenizer.decode(output) == "The capital of France is Paris.<|im_end|>"


def test_the_tokenizer_splits_numbers_and_loses_nothing(folder: Path) -> None:
    tokenizer = AutoTokenizer.from_pretrained(folder)
    assert tokenizer.convert_ids_to_tokens(tokenizer("In 1999")["input_ids"]) == ["In", "Ġ", "1", "9", "9", "9"]
    for text in ("naïve café", "héllo 🎉👩‍👩‍👧", "中文\t\n  x", " leading and trailing ", "<|im_start|>user\n"):
        assert tokenizer.decode(tokenizer(text)["input_ids"]) == text
    assert tokenizer("<|im_start|>")["input_ids"] == [1]
    assert tokenizer("")["input_ids"] == []


def test_the_folder_says_what_loaders_need(folder: Path) -> None:
    config = json.loads((folder / "config.json").read_bytes())
    assert config["architectures"] == ["LlamaForCausalLM"]
    assert config["rope_parameters"] == {"rope_type": "default", "rope_theta": 100000.0}
    assert (config["rms_norm_eps"], config["tie_word_embeddings"]) == (1e-5, True)
    assert (config["bos_token_id"], config["eos_token_id"]) == (1, 2)
    generation = json.loads((folder / "generation_config.json").read_bytes())
    assert (generation["eos_token_id"], generation["temperature"]) == (2, 0.2)
    assert "<|im_start|>" in json.loads((folder / "tokenizer_config.json").read_bytes())["chat_template"]
    files = WeightFiles(ModelFolder.read(folder))
    assert files.get("model.layers.29.self_attn.k_proj.weight").shape == (192, 576)
    assert files.dtype("model.layers.29.self_attn.k_proj.weight") == torch.bfloat16
    assert len(files.names) == 2 + 30 * 9
    assert files.paths == [embedded.embedded_file()]


def test_its_sampling_is_not_that_of_the_bare_file(folder: Path) -> None:
    bare = locate(str(embedded.embedded_file()))
    assert bare != folder
    assert json.loads((bare / "generation_config.json").read_bytes()) == {"eos_token_id": 2}


def test_a_missing_package_is_a_clear_error(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("QUIRE_CACHE", str(tmp_path))
    monkeypatch.setattr(embedded, "PACKAGE", "no_such_package_here")
    with pytest.raises(ModelError, match="make install"):
        locate("")
    assert not cache_folder().exists() or not list(cache_folder().iterdir())
