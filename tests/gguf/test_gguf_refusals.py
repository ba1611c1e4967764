"""What is wrong with a GGUF file is said in one line, before anything starts: the file, the tensor, its type."""

import struct
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from gguf import GGUFEndian, GGUFWriter
from numpy.typing import NDArray

from shared.errors import ModelError
from shared.gguf.folder import model_folder
from shared.gguf.header import read_header
from tests.gguf.writing import finish, plain_vocabulary, write
from tests.models.tiny import llama
from tests.models.variants import mixtral


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


def test_ldg_09_a_file_that_is_cut_short(whole: bytes, tmp_path: Path) -> None:
    last = max(read_header(saved(whole, tmp_path)).tensors.values(), key=lambda tensor: tensor.offset)
    said = refusal(saved(whole[: last.offset + last.nbytes - 1], tmp_path))
    assert f"model.gguf: tensor {last.name} (F32 " in said
    assert "it is cut short" in said


def test_wherever_a_header_ends_there_is_an_error_and_no_crash(whole: bytes, tmp_path: Path) -> None:
    end = min(tensor.offset for tensor in read_header(saved(whole, tmp_path)).tensors.values())
    for length in range(24, end, 37):
        assert "cut short" in refusal(saved(whole[:length], tmp_path))


def test_bytes_that_were_damaged_are_an_error_or_another_model(whole: bytes, tmp_path: Path) -> None:
    """Never anything else than a ModelError."""
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
    ("others", "said"),
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
def test_a_tensor_that_is_wrong(others: Mapping[str, NDArray[Any] | None], said: str, tmp_path: Path) -> None:
    assert said in refusal(write(llama(), tmp_path / "model.gguf", others=others))


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
    said = refusal(write(mixtral(), tmp_path / "model.gguf", others=wrong))
    assert (
        "tensor blk.1.ffn_down_exps.weight (F32 [4, 60, 77]): the model's settings ask for the shape [5, 60, 77]"
        in said
    )


def test_a_type_that_nobody_knows(whole: bytes, tmp_path: Path) -> None:
    name = b"blk.1.ffn_up.weight"
    place = whole.index(name) + len(name) + 4 + 2 * 8  # the number of its dimensions, and two
    content = whole[:place] + struct.pack("<I", 1999) + whole[place + 4 :]
    assert "tensor blk.1.ffn_up.weight has the unknown quantisation type 1999" in refusal(saved(content, tmp_path))


def test_another_architecture(tmp_path: Path) -> None:
    file = tmp_path / "model.gguf"
    writer = GGUFWriter(file, "rwkv6")
    said = refusal(finish(writer, file))
    assert "architecture rwkv6 is not supported (supported: llama, qwen2, qwen3, qwen3moe, gemma, " in said


def test_a_setting_that_is_missing_or_of_another_kind(tmp_path: Path) -> None:
    file = tmp_path / "model.gguf"
    for value, said in ((None, "llama.attention.head_count is missing"), ([1, 2], "head_count: Expected `int`")):
        writer = GGUFWriter(file, "llama")
        writer.add_tensor("token_embd.weight", np.zeros((4, 8), np.float32))
        writer.add_tokenizer_model("none")
        writer.add_block_count(1)
        writer.add_embedding_length(8)
        if value:
            writer.add_head_count(value)
        assert said in refusal(finish(writer, file))
        file.unlink()


def test_ldg_09_a_set_of_files(tmp_path: Path) -> None:
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
