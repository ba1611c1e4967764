"""Compares every quantised type with the `gguf` package's own dequantisation of whole tensors."""

from pathlib import Path

import numpy as np
import pytest
from gguf import GGUFWriter, quants
from gguf.constants import GGML_QUANT_SIZES, GGMLQuantizationType

from shared.gguf import tensor_data
from shared.gguf.header import read_header
from tests.gguf.gguf_writer import finish

QUANTISED = [type for type in GGMLQuantizationType if hasattr(getattr(quants, type.name, None), "dequantize_blocks")]


@pytest.mark.filterwarnings("ignore::RuntimeWarning")  # some blocks have NaN scales
@pytest.mark.parametrize("type", QUANTISED, ids=lambda type: type.name)
def test_random_blocks_in_chunks_by_threads_and_one_tensor_of_a_stack(
    type: GGMLQuantizationType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    block, size = GGML_QUANT_SIZES[type]
    stored = np.random.default_rng(int(type)).integers(0, 256, (3, 7, 2 * size), np.uint8)
    file = tmp_path / "model.gguf"
    writer = GGUFWriter(file, "llama")
    writer.add_tensor("stack", stored, raw_dtype=type)
    tensor = read_header(finish(writer, file)).tensors["stack"]
    assert tensor.shape == (3, 7, 2 * block)
    expected = quants.dequantize(stored, type)
    monkeypatch.setattr(tensor_data, "CHUNK", 5 * block)
    monkeypatch.setattr(tensor_data, "MIN_SHARED_CHUNKS", 2)
    for threads in (1, 3):
        np.testing.assert_array_equal(tensor_data.read_tensor(tensor, threads=threads), expected)
        np.testing.assert_array_equal(tensor_data.read_tensor(tensor, 1, threads), expected[1])


def test_the_usual_types_are_among_them() -> None:
    names = {type.name for type in QUANTISED}
    assert names >= {"Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q8_0", "Q2_K", "Q3_K", "Q4_K", "Q5_K", "Q6_K", "IQ4_NL", "BF16"}
