"""Tests LDG-12 on the real vocabularies that llama.cpp keeps, with the ids that the original tokenizers give.

They are too large for this repository: `QUIRE_TEST_VOCABULARIES` names the folder `models` of a copy of llama.cpp. Run
this test after a change of how tokenizers are made. The rules in shared/gguf/pre_tokenizers.py have passed it.
"""

import os
from pathlib import Path

import pytest

from shared.gguf.header import read_header
from shared.gguf.tokenizer import build_tokenizer

FOLDER = os.environ.get("QUIRE_TEST_VOCABULARIES")
NAMES = ["gpt-2", "llama-bpe", "llama-spm", "phi-3", "qwen2", "starcoder", "refact", "command-r", "deepseek-coder"]


@pytest.mark.skipif(not FOLDER, reason="QUIRE_TEST_VOCABULARIES is not set")
@pytest.mark.parametrize("name", NAMES)
def test_real_vocabularies(name: str) -> None:
    file = Path(FOLDER or "") / f"ggml-vocab-{name}.gguf"
    tokenizer = build_tokenizer(read_header(file).metadata)
    texts = Path(f"{file}.inp").read_text(encoding="utf-8").split("\n__ggml_vocab_test__\n")
    lines = Path(f"{file}.out").read_text().split("\n")
    assert len(texts) > 40
    for text, line in zip(texts, lines, strict=True):
        assert tokenizer.encode(text, add_special_tokens=False).ids == [int(id) for id in line.split()], text
