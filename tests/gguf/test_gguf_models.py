"""Compares models in GGUF files in Quire's worker with transformers, with the same (dequantised) weights."""

import itertools
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from gguf.constants import GGMLQuantizationType
from transformers import PreTrainedModel

from benchmarks.quantized_checkpoints import type_in
from kernels.cpu import extension
from kernels.load import ops
from kernels.quantized import RoundedWeight, StoredRows
from services.worker.checkpoint.model_folder import ModelFolder
from services.worker.checkpoint.weight_files import WeightFiles
from shared.errors import ModelError
from shared.gguf.folder import model_folder
from shared.gguf.header import read_header
from shared.gguf.tensor_data import Region
from tests.gguf import transformers_reference
from tests.gguf.gguf_writer import TypeOf, write
from tests.models.family_variants import gemma, gemma2, gemma3, gpt2, mistral, mixtral, phi3, qwen2, qwen3, qwen3_moe
from tests.models.tiny_models import Forward, llama, reference_logits

OPS = ops(torch.device("cpu"))
compiled = pytest.mark.skipif(not extension.load(), reason="the kernels are not compiled here")
TOKENS = torch.randint(3, 131, (41,), generator=torch.Generator().manual_seed(1)).tolist()
WIDE = {"hidden_size": 64, "intermediate_size": 96, "num_attention_heads": 4, "head_dim": 16}
"""Sizes of a model whose rows are whole blocks of 32, as the simple quantised types need."""

LLAMA3 = {"rope_type": "llama3", "rope_theta": 1e4, "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
YARN = {"rope_type": "yarn", "rope_theta": 1e4, "factor": 2.0, "original_max_position_embeddings": 64}
LINEAR = {"rope_type": "linear", "rope_theta": 1e4, "factor": 2.0}
LONG: dict[str, Any] = {"rope_type": "longrope", "rope_theta": 1e4, "original_max_position_embeddings": 32}
LONG |= {"short_factor": [1.0] * 8, "long_factor": [2.0 + at for at in range(8)]}  # TOKENS are more than 32
BLOCKS_256 = {"hidden_size": 256, "intermediate_size": 512, "num_attention_heads": 4, "head_dim": 64}
BLOCKS_256 |= {"initializer_range": 0.15}
"""Sizes of a model whose rows are whole blocks of 256, as the K types need."""

PHI = {name: size for name, size in WIDE.items() if name != "head_dim"}

MODELS: dict[str, Callable[[], PreTrainedModel]] = {
    "llama": lambda: llama(**WIDE),
    "llama, biases": lambda: llama(**WIDE, attention_bias=True, mlp_bias=True),
    "llama, stretched": lambda: llama(**WIDE, rope_parameters=LINEAR),
    "mistral": lambda: mistral(**WIDE, sliding_window=None),
    "mixtral": lambda: mixtral(**WIDE),
    "qwen2": lambda: qwen2(**WIDE, tie_word_embeddings=True),
    "qwen2, stretched": lambda: qwen2(**WIDE, rope_parameters=YARN),
    "qwen3": lambda: qwen3(**WIDE | {"head_dim": 32}),
    "qwen3moe": lambda: qwen3_moe(**WIDE, norm_topk_prob=True, moe_intermediate_size=32),
    "gemma": lambda: gemma(**WIDE),
    "gemma2": lambda: gemma2(**WIDE, query_pre_attn_scalar=16),
    "gemma3": lambda: gemma3(**WIDE, query_pre_attn_scalar=16, num_hidden_layers=7, sliding_window_pattern=6),
    "gemma3, stretched": lambda: gemma3(
        **WIDE,
        query_pre_attn_scalar=16,
        num_hidden_layers=7,
        sliding_window_pattern=6,
        rope_scaling={"rope_type": "linear", "factor": 8.0},
        rope_local_base_freq=500.0,
    ),
    "phi3": lambda: phi3(**PHI, sliding_window=7),
    "phi3, part of each head": lambda: phi3(**PHI, partial_rotary_factor=0.5),
    "phi3, long": lambda: phi3(**PHI, rope_parameters=LONG, original_max_position_embeddings=32),
    "gpt2": lambda: gpt2(n_embd=64, n_head=4),
    "gpt2, untied": lambda: gpt2(n_embd=64, n_head=4, tie_word_embeddings=False),
}


def mixed(name: str) -> GGMLQuantizationType:
    """Return one of all types that can be written, as files usually mix them."""
    names = ("Q4_0", "Q8_0", "Q5_1", "F16", "Q4_1", "BF16", "Q5_0", "F32")
    return GGMLQuantizationType[names[sum(name.encode()) % len(names)]]


def compare(file: Path, model: PreTrainedModel, cache: Path, **config: object) -> None:
    forward = Forward(model_folder(file, cache), dtype="float32", **config)
    forward.enter(0, TOKENS, range(11))
    (ours,) = forward.step((0, 0, len(TOKENS)))
    theirs = reference_logits(model, TOKENS)
    assert theirs.std() > 0.3  # the comparison is of something
    assert (ours - theirs).abs().max() < 1e-4


@pytest.mark.parametrize("name", MODELS)
def test_logits_of_mixed_types_are_those_of_transformers(name: str, tmp_path: Path) -> None:
    """LDG-09."""
    model = MODELS[name]()
    compare(write(model, tmp_path / "model.gguf", mixed), model, tmp_path / "cache")


def test_transformers_code_computes_a_gguf_file_too(tmp_path: Path) -> None:
    model = MODELS["gemma2"]()
    file = write(model, tmp_path / "model.gguf", mixed)
    compare(file, model, tmp_path / "cache", model_impl="transformers")


def test_frequencies_of_a_tensor_of_their_own_are_used(tmp_path: Path) -> None:
    """LDG-09."""
    model = llama(**WIDE, rope_parameters=LLAMA3 | {"original_max_position_embeddings": 32})
    file = write(model, tmp_path / "model.gguf")
    compare(file, model, tmp_path / "cache")
    plain = llama(**WIDE)
    plain.load_state_dict(model.state_dict())
    assert (reference_logits(plain, TOKENS) - reference_logits(model, TOKENS)).abs().max() > 0.01


def test_a_file_without_output_layer_is_tied(tmp_path: Path) -> None:
    """LDG-09."""
    model = llama(**WIDE, tie_word_embeddings=True)
    compare(write(model, tmp_path / "model.gguf", mixed), model, tmp_path / "cache")


def test_a_set_of_files_is_one_model(tmp_path: Path) -> None:
    """LDG-09."""
    model = llama(**WIDE)
    write(model, tmp_path / "model.gguf", mixed, split=8)
    compare(tmp_path / "model-00003-of-00004.gguf", model, tmp_path / "cache")


@pytest.mark.parametrize("type_name", ["Q8_0", "Q4_0", "Q4_1", "Q5_0", "Q5_1", "F16", "BF16"])
def test_each_type_of_weights(type_name: str, tmp_path: Path) -> None:
    model = llama(**WIDE, num_hidden_layers=1)
    file = write(model, tmp_path / "model.gguf", lambda name: GGMLQuantizationType[type_name])
    compare(file, model, tmp_path / "cache")


def plain_blocks(name: str) -> GGMLQuantizationType:
    """Return a type of blocks of 32 that matmuls take. Matrices that are joined have different types."""
    return GGMLQuantizationType[("Q4_0", "Q8_0", "Q4_1", "Q5_0", "Q5_1", "IQ4_NL")[sum(name.encode()) % 6]]


def k_types(name: str) -> GGMLQuantizationType:
    """Return a type of blocks of 256 that matmuls take. Matrices that are joined have different types."""
    return GGMLQuantizationType[("Q2_K", "Q3_K", "Q4_K", "Q5_K", "Q6_K", "IQ4_XS")[sum(name.encode()) % 6]]


@compiled
@pytest.mark.parametrize("types", [mixed, k_types], ids=["mixed", "K types"])
def test_matrices_of_floats_are_packed_from_the_file(types: TypeOf, tmp_path: Path) -> None:
    """To the bit as after they were dequantised; also a rank's part, unless it has parts of groups."""
    file = write(llama(**BLOCKS_256, num_hidden_layers=1), tmp_path / "model.gguf", types)
    files = WeightFiles(ModelFolder.read(model_folder(file, tmp_path / "cache")))
    regions: list[Region] = [(), (slice(64, 128), slice(0, 256)), (slice(0, 64), slice(32, 224))]
    compared = 0
    for name, region in itertools.product(files.names, regions):
        rows = files.dequantized_rows(name, region)
        if rows is None:
            continue  # a vector, or floats as torch has them
        assert isinstance(rows, StoredRows)
        packed, expected = (OPS.pack_linear(RoundedWeight(8, [part])) for part in (rows, rows.rows[:]))
        assert torch.equal(packed.panels, expected.panels)
        compared += 1
        if files.is_quantized(name):
            assert not isinstance(files.dequantized_rows(name, (slice(0, 64), slice(16, 64))), StoredRows)
    assert compared >= 3 * 4


def q4_k_m(name: str) -> GGMLQuantizationType:
    """Return the type in files of Q4_K_M, of three layers: v and down are in Q4_K in some, and in Q6_K in others."""
    return type_in("Q4_K_M", name, 3)


QUANTIZED: dict[str, tuple[Callable[[], PreTrainedModel], TypeOf]] = {
    **{name: (MODELS[name], plain_blocks) for name in ("llama", "mixtral", "qwen2", "gpt2")},
    "llama, K types": (lambda: llama(**BLOCKS_256), k_types),
    "qwen2, K types": (lambda: qwen2(**BLOCKS_256), k_types),
    "llama, Q4_K_M": (lambda: llama(**BLOCKS_256), q4_k_m),
    "llama, tied, Q4_K_M": (lambda: llama(**BLOCKS_256, tie_word_embeddings=True), q4_k_m),
    "mixtral, Q4_K_M": (lambda: mixtral(**BLOCKS_256), q4_k_m),
    "gpt2, Q4_K_M": (lambda: gpt2(n_embd=256, n_head=4), q4_k_m),
}


@compiled
@pytest.mark.parametrize("name", QUANTIZED)
def test_by_default_a_files_own_blocks_are_computed_with(
    name: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    make, types = QUANTIZED[name]
    model = make()
    forward = Forward(model_folder(write(model, tmp_path / "model.gguf", types), tmp_path / "cache"))
    assert (forward.precision.name, forward.dtype) == ("gguf", torch.bfloat16)
    forward.enter(0, TOKENS, range(11))
    (ours,) = forward.step((0, 0, len(TOKENS)))
    theirs = reference_logits(model, TOKENS)
    # Activations are rounded, and with weights as large as here each rounding grows. A wrong weight would give 1.
    assert 1e-4 < (ours - theirs).norm() / theirs.norm() < 0.2
    assert not caplog.records


@compiled
def test_a_block_that_is_not_finite_is_found_when_the_model_is_loaded(tmp_path: Path) -> None:
    path = write(llama(**BLOCKS_256), tmp_path / "model.gguf", q4_k_m)
    with path.open("r+b") as file:
        file.seek(read_header(path).tensors["blk.1.ffn_down.weight"].offset)
        file.write(struct.pack("<e", float("inf")))  # the scale of its first block
    with pytest.raises(ModelError, match="logits are not finite: weights are broken"):
        Forward(model_folder(path, tmp_path / "cache"))


@compiled
def test_types_that_are_not_computed_with_are_dequantised_and_named(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    model = llama(**WIDE)

    def some(name: str) -> GGMLQuantizationType:
        return GGMLQuantizationType["MXFP4" if name == "blk.1.ffn_down.weight" else "Q8_0"]

    folder = model_folder(write(model, tmp_path / "model.gguf", some), tmp_path / "cache")
    assert Forward(folder).precision.name == "gguf"
    assert "1 tensors are dequantised, model.layers.1.mlp.down_proj.weight the first" in caplog.text
    caplog.clear()
    other = model_folder(
        write(model, tmp_path / "other.gguf", lambda name: GGMLQuantizationType.MXFP4), tmp_path / "cache"
    )
    assert Forward(other).precision.name == "float32"
    assert "are dequantised: to compute with them as they are needs a GGUF file with blocks of Q2_K to" in caplog.text


@pytest.mark.parametrize("name", ["llama", "qwen2", "qwen3", "gemma2", "gemma3", "phi3", "gpt2"])
def test_tensors_are_those_that_transformers_finds(name: str, tmp_path: Path) -> None:
    """Transformers' own reader agrees on names, order of rows, transposition and what is subtracted."""
    file = write(MODELS[name](), tmp_path / "model.gguf", mixed)
    folder = model_folder(file, tmp_path / "cache")
    files = WeightFiles(ModelFolder.read(folder))
    _, theirs = transformers_reference.read(file, folder)
    assert set(theirs) == set(files.names)
    for tensor, values in theirs.items():
        assert torch.equal(files.get(tensor).float(), values.float()), tensor
