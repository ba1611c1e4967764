"""Every quantised type, against the `gguf` package's own way over whole tensors."""

from pathlib import Path

import numpy as np
import pytest
from gguf import GGUFWriter, quants
from gguf.constants import GGML_QUANT_SIZES, GGMLQuantizationType

from shared.gguf import blocks
from shared.gguf.header import read_header
from tests.gguf.writing import finish

QUANTISED = [kind for kind in GGMLQuantizationType if hasattr(getattr(quants, kind.name, None), "dequantize_blocks")]


@pytest.mark.filterwarnings("ignore::RuntimeWarning")  # some blocks have scales that are no numbers
@pytest.mark.parametrize("kind", QUANTISED, ids=lambda kind: kind.name)
def test_arbitrary_blocks_in_pieces_by_threads_and_one_of_a_stack(
    kind: GGMLQuantizationType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    block, size = GGML_QUANT_SIZES[kind]
    stored = np.random.default_rng(int(kind)).integers(0, 256, (3, 7, 2 * size), np.uint8)
    file = tmp_path / "model.gguf"
    writer = GGUFWriter(file, "llama")
    writer.add_tensor("stack", stored, raw_dtype=kind)
    tensor = read_header(finish(writer, file)).tensors["stack"]
    assert tensor.shape == (3, 7, 2 * block)
    expected = quants.dequantize(stored, kind)
    monkeypatch.setattr(blocks, "CHUNK", 5 * block)
    monkeypatch.setattr(blocks, "SHARED", 2)
    for threads in (1, 3):
        np.testing.assert_array_equal(blocks.read_part(tensor, threads=threads), expected)
        np.testing.assert_array_equal(blocks.read_part(tensor, 1, threads), expected[1])


def test_the_usual_types_are_among_them() -> None:
    names = {kind.name for kind in QUANTISED}
    assert names >= {"Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q8_0", "Q2_K", "Q3_K", "Q4_K", "Q5_K", "Q6_K", "IQ4_NL", "BF16"}
