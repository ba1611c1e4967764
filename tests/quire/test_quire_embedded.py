"""The embedded model: its conversion is right, happens once, and is never seen half done."""

import json
import threading
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors import safe_open
from transformers import AutoModelForCausalLM, AutoTokenizer

from quire import embedded, gguf_checkpoint
from shared.errors import ModelError


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """The real model, converted into a cache of the tests' own."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("QUIRE_CACHE", str(tmp_path_factory.mktemp("cache")))
        yield embedded.folder()


@pytest.fixture
def writes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[Path]:
    """A cache of its own and a writer that only leaves config.json; the folders that it was asked to fill."""
    asked: list[Path] = []

    def write_folder(source: Path, folder: Path, sampling: object) -> None:
        asked.append(folder)
        (folder / "config.json").write_text(f"conversion {len(asked)}")

    monkeypatch.setenv("QUIRE_CACHE", str(tmp_path))
    monkeypatch.setattr(gguf_checkpoint, "write_folder", write_folder)
    return asked


def test_transformers_reads_the_folder_and_the_model_makes_sense(folder: Path) -> None:
    tokenizer = AutoTokenizer.from_pretrained(folder)
    model = AutoModelForCausalLM.from_pretrained(folder)
    assert model.dtype == torch.bfloat16
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
    assert (config["rms_norm_eps"], config["rope_theta"], config["tie_word_embeddings"]) == (1e-5, 100000.0, True)
    assert (config["bos_token_id"], config["eos_token_id"]) == (1, 2)
    generation = json.loads((folder / "generation_config.json").read_bytes())
    assert (generation["eos_token_id"], generation["temperature"]) == (2, 0.2)
    assert "<|im_start|>" in json.loads((folder / "tokenizer_config.json").read_bytes())["chat_template"]
    with safe_open(folder / "model.safetensors", "pt") as weights:
        names = set(weights.keys())
        assert weights.get_tensor("model.layers.29.self_attn.k_proj.weight").shape == (192, 576)
    assert len(names) == 2 + 30 * 9


def test_rotary_rows_are_moved_from_pairs_to_halves() -> None:
    rows = np.arange(8, dtype=np.float32)[:, None]  # two heads of four rows
    assert gguf_checkpoint.halves_from_pairs(rows, 2)[:, 0].tolist() == [0, 2, 1, 3, 4, 6, 5, 7]


def test_bfloat16_is_rounded_as_torch_does() -> None:
    random = np.random.default_rng(0).standard_normal(1001).astype(np.float32)
    ties = np.array([1 + 1 / 256, 1 + 3 / 256, -0.0, 3e38], dtype=np.float32)
    values = np.concatenate([random, ties])
    expected = torch.from_numpy(values).to(torch.bfloat16).view(torch.uint16).numpy()
    assert (gguf_checkpoint.bfloat16_bits(values) == expected).all()


def test_an_unknown_tensor_is_refused() -> None:
    assert gguf_checkpoint.hugging_face_name("blk.3.ffn_up.weight") == ("model.layers.3.mlp.up_proj.weight", "ffn_up")
    with pytest.raises(ModelError, match=r"blk\.0\.attn_rel_b\.weight"):
        gguf_checkpoint.hugging_face_name("blk.0.attn_rel_b.weight")


def test_starts_at_the_same_time_convert_once(writes: list[Path]) -> None:
    barrier = threading.Barrier(4)

    def start() -> None:
        barrier.wait()
        assert (embedded.folder() / "config.json").is_file()

    threads = [threading.Thread(target=start) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(writes) == 1


def test_a_killed_conversion_leaves_nothing_that_matters(writes: list[Path], tmp_path: Path) -> None:
    partial = tmp_path / "models" / ".SmolLM2-135M-Instruct.partial"
    partial.mkdir(parents=True)
    (partial / "model.safetensors").write_text("half")
    folder = embedded.folder()
    assert not partial.exists()
    assert not (folder / "model.safetensors").exists()


def test_a_folder_of_an_older_form_is_made_anew(writes: list[Path], monkeypatch: pytest.MonkeyPatch) -> None:
    embedded.folder()
    monkeypatch.setattr(embedded, "FORMAT", embedded.FORMAT + 1)
    folder = embedded.folder()
    assert (folder / "config.json").read_text() == "conversion 2"
    assert sorted(path.name for path in folder.parent.iterdir()) == [f".{folder.name}.lock", folder.name]


def test_a_failing_conversion_leaves_no_folder(writes: list[Path], monkeypatch: pytest.MonkeyPatch) -> None:
    def full_disk(source: Path, folder: Path, sampling: object) -> None:
        (folder / "config.json").write_text("{}")
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(gguf_checkpoint, "write_folder", full_disk)
    with pytest.raises(ModelError, match="No space left"):
        embedded.folder()
    assert not embedded.embedded_folder().exists()
    assert [path.suffix for path in embedded.embedded_folder().parent.iterdir()] == [".lock"]


def test_a_missing_package_is_a_clear_error(monkeypatch: pytest.MonkeyPatch, writes: list[Path]) -> None:
    monkeypatch.setattr(embedded, "PACKAGE", "no_such_package_here")
    with pytest.raises(ModelError, match="make install"):
        embedded.folder()
