"""A model folder for tests that need weights and a tokenizer."""

import json
from pathlib import Path

import pytest
import tokenizers
import torch
from transformers import OPTConfig, OPTForCausalLM

CORPUS = [
    "The quick brown fox jumps over the lazy dog.",
    "What is the capital of France? Paris is the capital of France.",
]
CHAT_TEMPLATE = (
    "{% for m in messages %}[{{ m.role }}] {{ m.content }}\n{% endfor %}{% if add_generation_prompt %}> {% endif %}"
)


@pytest.fixture(scope="session")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the folder of a tiny OPT with random weights and a tokenizer trained on a few sentences."""
    folder = tmp_path_factory.mktemp("opt")
    tokenizer = tokenizers.Tokenizer(tokenizers.models.BPE())
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = tokenizers.decoders.ByteLevel()
    trainer = tokenizers.trainers.BpeTrainer(
        vocab_size=320,
        special_tokens=["<s>", "<pad>", "</s>"],
        initial_alphabet=tokenizers.pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(CORPUS, trainer)
    tokenizer.save(str(folder / "tokenizer.json"))
    settings = {"eos_token": "</s>", "pad_token": "<pad>", "chat_template": CHAT_TEMPLATE}
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))
    torch.manual_seed(0)
    config = OPTConfig(
        vocab_size=tokenizer.get_vocab_size(),
        hidden_size=32,
        word_embed_proj_dim=32,
        ffn_dim=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        max_position_embeddings=128,
        init_std=0.3,  # so that the likeliest token stands out
    )
    OPTForCausalLM(config).save_pretrained(folder)
    return folder


@pytest.fixture(scope="session")
def adapters(folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a folder with adapters of the tiny model, and one that it does not take: see `make_adapters`."""
    from tests.quire.adapter_folders import make_adapters  # imported here since PEFT takes seconds

    path = tmp_path_factory.mktemp("adapters")
    make_adapters(folder, path)
    return path
