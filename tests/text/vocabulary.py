"""A small byte-level tokenizer, made on the spot, and a model folder around it (no weights)."""

import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import tokenizers
from tokenizers import AddedToken, decoders, models, pre_tokenizers, processors

from shared.text.tokenizer import Tokenizer

SPECIAL = ["<s>", "</s>", "<|im_start|>", "<|im_end|>"]
WORDS = [
    "pre",
    "view",
    "port",
    "one",
    "Ġtwo",
    "Ġthree",
    "Ġfour",
    "Ġfive",
    "Ġsix",
    "user",
    "assistant",
    "system",
    "hello",
]

CHATML = (
    "{% for message in messages %}<|im_start|>{{ message.role }}\n{{ message.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


def make_backend(words: Iterable[str] = WORDS, bos: bool = False) -> tokenizers.Tokenizer:
    """Byte-level BPE with one token for each byte and each of `words` (written with Ġ for a space)."""
    tokens = list(pre_tokenizers.ByteLevel.alphabet())
    tokens.sort()
    merges: list[tuple[str, str]] = []
    for word in words:
        for end in range(1, len(word)):
            pair = (word[:end], word[end])
            if pair not in merges:
                merges.append(pair)
                tokens.append(word[: end + 1])
    vocab = {token: id for id, token in enumerate(dict.fromkeys([*SPECIAL, *tokens]))}
    backend = tokenizers.Tokenizer(models.BPE(vocab=vocab, merges=merges))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens([AddedToken(name, special=True, normalized=False) for name in SPECIAL])
    if bos:
        backend.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", vocab["<s>"])])
    return backend


def make_tokenizer(words: Iterable[str] = WORDS, bos: bool = False) -> Tokenizer:
    backend = make_backend(words, bos)
    special = {"bos_token": "<s>", "eos_token": "</s>"}
    return Tokenizer(backend, special=special, eos_token_ids=[backend.token_to_id("</s>")])


def write_model_folder(
    folder: Path,
    *,
    words: Iterable[str] = WORDS,
    bos: bool = False,
    template: Any = CHATML,
    generation: dict[str, Any] | None = None,
) -> Path:
    """What a gateway reads of a model."""
    folder.mkdir(parents=True, exist_ok=True)
    make_backend(words, bos).save(str(folder / "tokenizer.json"))
    settings: dict[str, Any] = {
        "bos_token": "<s>",
        "eos_token": {"__type": "AddedToken", "content": "</s>"},
        "chat_template": template,
    }
    if template is None:
        del settings["chat_template"]
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))
    (folder / "config.json").write_text(json.dumps({"eos_token_id": 1}))
    if generation is not None:
        (folder / "generation_config.json").write_text(json.dumps(generation))
    return folder
