"""Tests that a broken GGUF file is refused before the start, in one line with the file, the tensor and its type."""

import os
import re
import struct
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from gguf import GGUFEndian, GGUFValueType, GGUFWriter
from numpy.typing import NDArray

from services.worker.checkpoint.model_folder import ModelFolder
from services.worker.checkpoint.weight_files import WeightFiles
from shared.errors import ModelError
from shared.gguf.damage import damage_as_model_error
from shared.gguf.folder import model_folder, read_pointer
from shared.gguf.header import read_header
from shared.hub.checkpoint import locate
from shared.hub.download import gguf_files
from tests.gguf.gguf_writer import EMPTY, finish, plain_vocabulary, with_key, write
from tests.models.family_variants import mixtral
from tests.models.tiny_models import llama


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> bytes:
    return write(llama(), tmp_path_factory.mktemp("gguf") / "model.gguf").read_bytes()


def refusal(file: Path) -> str:
    with pytest.raises(ModelError) as caught:
        model_folder(file, file.parent / "cache")
    assert str(file.parent) in str(caught.value)
    return str(caught.value)


def saved(content: bytes, folder: Path) -> Path:
    file = folder / "model.gguf"
    file.write_bytes(content)
    return file


def test_what_is_no_gguf_file(whole: bytes, tmp_path: Path) -> None:
    assert "model.gguf is not a GGUF file: it is empty" in refusal(saved(b"", tmp_path))
    assert "model.gguf is not a GGUF file: it does not begin with" in refusal(saved(b"GGML" + whole[4:], tmp_path))
    assert "has version 1 of the format (supported" in refusal(saved(whole[:4] + b"\1\0\0\0" + whole[8:], tmp_path))
    for length in (3, 7, 20):
        assert "is cut short" in refusal(saved(whole[:length], tmp_path))


def test_a_big_endian_file(tmp_path: Path) -> None:
    file = write(llama(), tmp_path / "model.gguf", endianness=GGUFEndian.BIG)
    assert "is a big-endian file (supported: little-endian" in refusal(file)


def test_a_file_that_is_cut_short(whole: bytes, tmp_path: Path) -> None:
    """LDG-09."""
    last = max(read_header(saved(whole, tmp_path)).tensors.values(), key=lambda tensor: tensor.offset)
    message = refusal(saved(whole[: last.offset + last.nbytes - 1], tmp_path))
    assert f"model.gguf: tensor {last.name} (F32 " in message
    assert "it is cut short" in message


def test_wherever_a_header_ends_there_is_an_error_and_no_crash(whole: bytes, tmp_path: Path) -> None:
    end = min(tensor.offset for tensor in read_header(saved(whole, tmp_path)).tensors.values())
    for length in range(24, end, 37):
        assert "cut short" in refusal(saved(whole[:length], tmp_path))


def test_bytes_that_were_damaged_are_an_error_or_another_model(whole: bytes, tmp_path: Path) -> None:
    """A damaged header raises ModelError and nothing else."""
    rng = np.random.default_rng(0)
    end = min(tensor.offset for tensor in read_header(saved(whole, tmp_path)).tensors.values())
    refused = 0
    for _ in range(150):
        content = bytearray(whole)
        for place in rng.integers(8, end, 3):
            content[place] = rng.integers(256)
        try:
            model_folder(saved(bytes(content), tmp_path), tmp_path / "cache")
        except ModelError:
            refused += 1
    assert refused > 30


@pytest.mark.parametrize(
    ("others", "message"),
    [
        (
            {"blk.1.ffn_up.weight": None},
            "tensor blk.1.ffn_up.weight (Hugging Face's model.layers.1.mlp.up_proj.w",
        ),
        ({"output_norm.weight": None}, "tensor output_norm.weight (Hugging Face's model.norm.weight) is missing"),
        ({"token_embd.weight": None}, "tensor token_embd.weight is missing"),
        (
            {"blk.0.attn_k.weight": np.zeros((20, 61))},
            "tensor blk.0.attn_k.weight (F64 [20, 61]): the model's",
        ),
        ({"blk.2.attn_norm.weight": np.zeros(59)}, "settings ask for the shape [60]"),
        ({"blk.0.attn_q_norm.weight": np.zeros(10)}, "tensor blk.0.attn_q_norm.weight (F64 [10]): a LlamaForCausalLM"),
        ({"blk.0.ffn_gate_exps.weight": np.zeros(10)}, "tensor blk.0.ffn_gate_exps.weight (F64 [10]): a Llama"),
        (
            {"blk.1.attn_q.weight": np.zeros((60, 60), np.int8)},
            "(I8 [60, 60]): this type cannot be read (supported: F",
        ),
        ({"rope_freqs.weight": np.zeros(7)}, "tensor rope_freqs.weight (F64 [7]): must have the shape [5]"),
        ({"token_embd.weight": np.zeros((130, 60))}, "tensor token_embd.weight (F64 [130, 60]): there are 131 tokens"),
    ],
)
def test_a_tensor_that_is_wrong(others: Mapping[str, NDArray[Any] | None], message: str, tmp_path: Path) -> None:
    assert message in refusal(write(llama(), tmp_path / "model.gguf", others=others))


def test_numbers_that_no_file_can_hold(whole: bytes, tmp_path: Path) -> None:
    name = b"llama.block_count"
    place = whole.index(name) + len(name) + 4
    content = whole[:place] + struct.pack("<I", 2**31) + whole[place + 4 :]
    assert "it has 30 tensors, which cannot be 2147483648 layers" in refusal(saved(content, tmp_path))


def test_a_vocabulary_that_is_none(tmp_path: Path) -> None:
    vocabulary = plain_vocabulary(131) | {"token_types": [1.5] * 131}
    assert "tokenizer.ggml.token_type: Expected `int`" in refusal(
        write(llama(), tmp_path / "model.gguf", vocabulary=vocabulary)
    )


def test_experts_of_another_number(tmp_path: Path) -> None:
    wrong = {"blk.1.ffn_down_exps.weight": np.zeros((4, 60, 77), np.float32)}
    message = refusal(write(mixtral(), tmp_path / "model.gguf", others=wrong))
    assert (
        "tensor blk.1.ffn_down_exps.weight (F32 [4, 60, 77]): the model's settings ask for the shape [5, 60, 77]"
        in message
    )


def test_a_type_that_nobody_knows(whole: bytes, tmp_path: Path) -> None:
    name = b"blk.1.ffn_up.weight"
    place = whole.index(name) + len(name) + 4 + 2 * 8  # the number of its dimensions, and two
    content = whole[:place] + struct.pack("<I", 1999) + whole[place + 4 :]
    assert "tensor blk.1.ffn_up.weight has the unknown quantisation type 1999" in refusal(saved(content, tmp_path))


@pytest.mark.parametrize("name", ["general.architecture", "tokenizer.ggml.tokens", "own.key"])
def test_a_key_that_is_there_twice(name: str, whole: bytes, tmp_path: Path) -> None:
    content = with_key(with_key(whole, "own.key", EMPTY), name, EMPTY).replace(b"filler", b"filled", 1)
    assert refusal(saved(content, tmp_path)) == f"{tmp_path}/model.gguf: there are two keys called {name}"


@pytest.mark.parametrize("name", [b"blk.0.ffn_up.weight", b"llama.context_length"])
def test_a_name_that_runs_into_the_weights_is_not_shown_in_whole(name: bytes, whole: bytes, tmp_path: Path) -> None:
    at = whole.index(name)
    content = whole[: at - 8] + struct.pack("<Q", len(whole) - at - 100) + whole[at:]
    message = refusal(saved(content, tmp_path))
    assert re.search(
        rf"model\.gguf is damaged: behind \w+ \S+ there is a \w+ called '{re.escape(name.decode())}", message
    )
    assert len(message) < 300
    assert message.isprintable()


def test_a_tensor_that_is_there_twice(whole: bytes, tmp_path: Path) -> None:
    content = whole.replace(b"blk.1.ffn_up.weight", b"blk.0.ffn_up.weight")
    message = refusal(saved(content, tmp_path))
    assert message == f"{tmp_path}/model.gguf: there are two tensors called blk.0.ffn_up.weight"


@pytest.mark.parametrize("depth", [2, 3000])
def test_arrays_of_arrays(depth: int, whole: bytes, tmp_path: Path) -> None:
    nested = struct.pack("<I", GGUFValueType.ARRAY) + struct.pack("<IQ", GGUFValueType.ARRAY, 1) * (depth - 1)
    content = with_key(whole, "own.key", nested + struct.pack("<IQ", GGUFValueType.UINT32, 0))
    message = refusal(saved(content, tmp_path))
    assert message == f"{tmp_path}/model.gguf: key own.key is an array of arrays, which is not supported"


@pytest.mark.parametrize("name", ["t-00000-of-00000.gguf", "t-00000-of-00002.gguf", "t-00003-of-00002.gguf"])
def test_a_name_of_no_possible_part(name: str, whole: bytes, tmp_path: Path) -> None:
    (tmp_path / name).write_bytes(whole)
    message = refusal(tmp_path / name)
    assert message == f"{tmp_path / name}: its name says that it is part {name[2:7]} of {name[11:16]}; rename it"


def test_a_name_that_is_no_text(whole: bytes, tmp_path: Path) -> None:
    file = tmp_path / os.fsdecode(b"m\xff.gguf")
    file.write_bytes(whole)
    assert "m\\xff.gguf': this path is not UTF-8; rename" in refusal(file)


def test_a_name_in_capitals_is_one(whole: bytes, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("QUIRE_CACHE", str(tmp_path / "cache"))
    for name in ("UP.GGUF", "set-00001-of-00001.GGUF"):
        (tmp_path / name).write_bytes(whole)
        pointer = read_pointer(locate(str(tmp_path / name)))
        assert pointer is not None
        assert pointer.files == [str(tmp_path / name)]
    with pytest.raises(ModelError, match=r"name the file itself: .*/UP\.GGUF"):
        locate(str(tmp_path))
    assert gguf_files(["UP-Q8_0.GGUF"], "q8_0") == ["UP-Q8_0.GGUF"]


def test_a_file_that_was_cut_short_later(whole: bytes, tmp_path: Path) -> None:
    file = saved(whole, tmp_path)
    files = WeightFiles(ModelFolder.read(model_folder(file, tmp_path / "cache")))
    os.truncate(file, 1000)
    with pytest.raises(ModelError, match=rf"^{file}: tensor output_norm.weight \(F32 \[60\]\) cannot be read \("):
        files.get("model.norm.weight")


@pytest.mark.parametrize(
    "error", [ValueError("a\nb"), OverflowError("a b"), RecursionError("a b"), TypeError("a b"), IndexError("a b")]
)
def test_an_unforeseen_exception_is_one_line_too(error: Exception) -> None:
    with pytest.raises(ModelError) as caught, damage_as_model_error("x.gguf"):
        raise error
    assert str(caught.value) == f"x.gguf cannot be read ({type(error).__name__}: a b)"
    assert caught.value.__cause__ is error


def test_another_architecture(tmp_path: Path) -> None:
    file = tmp_path / "model.gguf"
    writer = GGUFWriter(file, "rwkv6")
    message = refusal(finish(writer, file))
    assert "architecture rwkv6 is not supported (supported: llama, qwen2, qwen3, qwen3moe, gemma, " in message


def test_a_setting_that_is_missing_or_of_another_kind(tmp_path: Path) -> None:
    file = tmp_path / "model.gguf"
    for value, message in ((None, "llama.attention.head_count is missing"), ([1, 2], "head_count: Expected `int`")):
        writer = GGUFWriter(file, "llama")
        writer.add_tensor("token_embd.weight", np.zeros((4, 8), np.float32))
        writer.add_tokenizer_model("none")
        writer.add_block_count(1)
        writer.add_embedding_length(8)
        if value:
            writer.add_head_count(value)
        assert message in refusal(finish(writer, file))
        file.unlink()


def test_a_set_of_files(tmp_path: Path) -> None:
    """LDG-09."""
    model = llama()
    write(model, tmp_path / "model.gguf", split=8)
    files = sorted(tmp_path.glob("*.gguf"))
    assert [file.name for file in files] == [f"model-0000{part}-of-00004.gguf" for part in (1, 2, 3, 4)]
    header = read_header(files[2])
    assert header.paths == tuple(files)
    assert len(header.tensors) == 3 + 3 * 9
    assert header.tensors["output_norm.weight"].path != header.tensors["token_embd.weight"].path
    assert model_folder(files[0], tmp_path / "cache") == model_folder(files[3], tmp_path / "cache")
    files[1].rename(tmp_path / "kept")
    assert f"there is no file {files[1]} (it is one of the 4 files of this model)" in refusal(files[0])
    (tmp_path / "kept").rename(tmp_path / "alone.gguf")
    assert "it is one of 4 files, which must keep their names" in refusal(tmp_path / "alone.gguf")
    (tmp_path / "alone.gguf").rename(files[1])
    files[2].write_bytes(files[1].read_bytes())
    assert f"{files[2]}: tensor " in refusal(files[0])  # which it has in common with the second
