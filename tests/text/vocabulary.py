"""Makes small tokenizers of every type, and a model folder with the byte-level one and without weights."""

import json
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any, NamedTuple

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
    """Return byte-level BPE with one token for each byte and for each of `words` (with Ġ for a space)."""
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
    """Write the files of a model that a gateway reads."""
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


class Vocabulary(NamedTuple):
    """A tokenizer, and groups of its ids."""

    tokenizer: Tokenizer
    byte_ids: list[int]  # the token of each of the 256 bytes; empty if there are none
    shown_ids: list[int]  # the ids that are not special
    silent_ids: list[int]  # ids of special tokens, and ids that no token has


def make_vocabulary(name: str) -> Vocabulary:
    """Return a vocabulary of `KINDS`."""
    backend, byte_tokens = KINDS[name]()
    special = [backend.token_to_id(name) for name in SPECIAL]
    size = backend.get_vocab_size()
    return Vocabulary(
        Tokenizer(backend, special={"bos_token": "<s>", "eos_token": "</s>"}, eos_token_ids=[special[1]]),
        [backend.token_to_id(token) for token in byte_tokens],
        sorted(set(backend.get_vocab().values()) - set(special)),
        [*special, size + 1, 10**6],
    )


def _byte_level() -> tuple[tokenizers.Tokenizer, list[str]]:
    """Return byte-level BPE with tokens of two or three bytes of a character, of its end and more, and of U+FFFD."""
    letters = _byte_letters()
    parts = [b"\xf0\x9f\x98", b"\x80!", b"\xef\xbf\xbd", b"\xe4\xb8\x80", b"\x80\xe4\xb8", b"a\xe4", b"\xff\xf4"]
    backend = make_backend([*WORDS, *("".join(letters[byte] for byte in part) for part in parts)])
    backend.add_tokens([AddedToken(name, normalized=False) for name in ("<tool>", "  ", "é", "한")])
    return backend, letters


def _byte_letters() -> list[str]:
    """Return the character that byte-level BPE writes for each byte."""
    plain = [byte for byte in range(256) if chr(byte).isprintable() and chr(byte) != " "]
    others = [byte for byte in range(256) if byte not in plain]
    return [chr(byte) if byte in plain else chr(256 + others.index(byte)) for byte in range(256)]


def _byte_fallback(*parts: decoders.Decoder) -> tuple[tokenizers.Tokenizer, list[str]]:
    byte_tokens = [f"<0x{byte:02X}>" for byte in range(256)]
    pieces = ["▁", "▁▁", "a", "▁a", "▁Hi", "x▁", "é", "一", "\ufffd", "<0xE9", "\n"]
    return _from_tokens([*SPECIAL, *byte_tokens, *pieces], decoders.Sequence(list(parts))), byte_tokens


def _sentence_piece(*parts: decoders.Decoder) -> tuple[tokenizers.Tokenizer, list[str]]:
    tokens = [*SPECIAL, "▁", "▁▁", "a", "▁a", "▁Hi", "x▁y", "é", "", "<0xE9>", "\ufffd"]
    return _from_tokens(tokens, decoders.Sequence(list(parts))), []


def _word_piece(decoder: decoders.Decoder | None) -> tuple[tokenizers.Tokenizer, list[str]]:
    return _from_tokens([*SPECIAL, "hello", "##ing", "##", "n't", "'", ".", "do not", "é", "", "\ufffd"], decoder), []


def _from_tokens(tokens: list[str], decoder: decoders.Decoder | None) -> tokenizers.Tokenizer:
    # no token has id 10; the library numbers added tokens by the count of the others, so the first takes the last id
    vocab = {token: id + (id > 9) for id, token in enumerate([*tokens, "replaced"])}
    backend = tokenizers.Tokenizer(models.WordLevel(vocab, unk_token=tokens[0]))
    backend.decoder = decoder
    backend.add_special_tokens([AddedToken(name, special=True, normalized=False) for name in SPECIAL])
    backend.add_tokens([AddedToken(name, normalized=False) for name in ("<tool>", "▁tool")])
    return backend


_SPACES, _BYTES, _FUSE = decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()

KINDS: dict[str, Callable[[], tuple[tokenizers.Tokenizer, list[str]]]] = {
    "byte-level": _byte_level,
    "byte-fallback": lambda: _byte_fallback(_SPACES, _BYTES, _FUSE),  # as Gemma
    "byte-fallback, stripped": lambda: _byte_fallback(_SPACES, _BYTES, _FUSE, decoders.Strip(" ", 1, 0)),  # as Llama 2
    "pieces, stripped": lambda: _sentence_piece(_SPACES, _FUSE, decoders.Strip(" ", 2, 0)),
    "pieces, each stripped": lambda: _sentence_piece(_SPACES, decoders.Strip(" ", 1, 0), _FUSE),
    "Metaspace": lambda: _sentence_piece(decoders.Metaspace()),
    "Metaspace, no prefix": lambda: _sentence_piece(decoders.Metaspace(prepend_scheme="never")),
    "WordPiece": lambda: _word_piece(decoders.WordPiece()),
    "WordPiece, no cleanup": lambda: _word_piece(decoders.WordPiece(cleanup=False)),
    "no decoder": lambda: _word_piece(None),
}
