"""Tests that a GGUF file's tokenizer gives texts the same ids as the original that it was made from."""

import hashlib
import inspect
import io
import json
import math
import re
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import sentencepiece
from gguf import TokenType
from tokenizers import AddedToken, Regex, decoders, models, pre_tokenizers, trainers
from tokenizers import Tokenizer as Backend
from transformers import GPT2Tokenizer, Qwen2Tokenizer
from transformers.convert_slow_tokenizer import TikTokenConverter
from transformers.integrations.gguf.gguf_tokenizer_mapping import GGUF_PRE_TOKENIZER_SPLITS

from shared.errors import ModelError
from shared.gguf.folder import model_folder
from shared.hub.checkpoint import locate
from shared.text.tokenizer import Tokenizer, check_tokenizer_files
from tests.gguf.gguf_writer import EMPTY, plain_vocabulary, with_key, write
from tests.gguf.tokenizer_texts import ADDED, CORPUS, SPECIAL, TEXTS
from tests.models.tiny_models import llama

BYTES = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
LLAMA3 = inspect.signature(TikTokenConverter.__init__).parameters["pattern"].default


def gpt2(vocabulary: dict[str, int], merges: list[tuple[str, str]]) -> Backend:
    return GPT2Tokenizer(vocab=vocabulary, merges=merges).backend_tokenizer


def qwen2(vocabulary: dict[str, int], merges: list[tuple[str, str]]) -> Backend:
    return Qwen2Tokenizer(vocab=vocabulary, merges=merges, eos_token=SPECIAL[1]).backend_tokenizer


def smollm(vocabulary: dict[str, int], merges: list[tuple[str, str]]) -> Backend:
    original = Backend(models.BPE(vocab=vocabulary, merges=merges))
    digits = pre_tokenizers.Digits(individual_digits=True)
    original.pre_tokenizer = pre_tokenizers.Sequence([digits, pre_tokenizers.ByteLevel(add_prefix_space=False)])
    original.decoder = decoders.ByteLevel()
    return original


def split_by(pattern: str, *, ignore_merges: bool) -> Callable[..., Backend]:
    def original(vocabulary: dict[str, int], merges: list[tuple[str, str]]) -> Backend:
        backend = Backend(models.BPE(vocab=vocabulary, merges=merges, ignore_merges=ignore_merges))
        backend.pre_tokenizer = pre_tokenizers.Sequence(
            [pre_tokenizers.Split(Regex(pattern), behavior="isolated"), BYTES]
        )
        backend.decoder = decoders.ByteLevel()
        return backend

    return original


def deepseek_coder(vocabulary: dict[str, int], merges: list[tuple[str, str]]) -> Backend:
    backend = Backend(models.BPE(vocab=vocabulary, merges=merges))
    cut = partial(pre_tokenizers.Split, behavior="isolated")
    first = [cut("\n"), cut("\r"), cut(Regex(r"\s?\p{L}+")), cut(Regex(r"\s?\p{P}+")), cut(Regex("[一-龥ࠀ-一가-퟿]+"))]
    backend.pre_tokenizer = pre_tokenizers.Sequence([*first, pre_tokenizers.Digits(individual_digits=True), BYTES])
    backend.decoder = decoders.ByteLevel()
    return backend


ORIGINALS: dict[str, Callable[..., Backend]] = {
    "gpt-2": gpt2,
    "smollm": smollm,
    "refact": smollm,
    "starcoder": smollm,
    "command-r": smollm,
    "deepseek-coder": deepseek_coder,
    "qwen2": qwen2,
    "llama-bpe": split_by(LLAMA3, ignore_merges=True),
    "dbrx": split_by(GGUF_PRE_TOKENIZER_SPLITS["dbrx"], ignore_merges=False),
    "tekken": split_by(GGUF_PRE_TOKENIZER_SPLITS["tekken"], ignore_merges=True),
    "gpt-4o": split_by(GGUF_PRE_TOKENIZER_SPLITS["gpt-4o"], ignore_merges=False),
}


def trained(make: Callable[..., Backend]) -> tuple[Backend, list[str], list[tuple[str, str]]]:
    """Return a trained tokenizer, its tokens and its merges."""
    learner = make({SPECIAL[1]: 0}, [])
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=700, initial_alphabet=alphabet, show_progress=False)
    fresh = Backend(models.BPE())
    fresh.pre_tokenizer = learner.pre_tokenizer
    if learner.normalizer is not None:
        fresh.normalizer = learner.normalizer
    fresh.train_from_iterator(CORPUS, trainer)
    model = json.loads(fresh.to_str())["model"]
    tokens = [*sorted(model["vocab"], key=model["vocab"].__getitem__), *SPECIAL, *ADDED]
    merges = [tuple(merge) for merge in model["merges"]]
    original = make({token: id for id, token in enumerate(tokens)}, merges)
    original.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in SPECIAL])
    original.add_tokens([AddedToken(token, special=False, normalized=False) for token in ADDED])
    return original, tokens, merges


def folder_of(vocabulary: dict[str, Any], place: Path) -> Path:
    size = len(vocabulary["token_list"])
    file = write(llama(vocab_size=size, num_hidden_layers=1), place / "model.gguf", vocabulary=vocabulary)
    return model_folder(file, place / "cache")


def byte_level(name: str, tokens: Sequence[str], merges: Sequence[tuple[str, str]]) -> dict[str, Any]:
    types = [TokenType.NORMAL] * len(tokens)
    for token in SPECIAL:
        types[tokens.index(token)] = TokenType.CONTROL
    for token in ADDED:
        types[tokens.index(token)] = TokenType.USER_DEFINED
    return {
        "model": "gpt2",
        "pre": name,
        "token_list": tokens,
        "token_types": types,
        "token_merges": [" ".join(merge) for merge in merges],
        "bos_token_id": tokens.index(SPECIAL[0]),
        "eos_token_id": tokens.index(SPECIAL[1]),
    }


def test_there_are_fifty_texts() -> None:
    assert len(set(TEXTS)) >= 50


@pytest.mark.parametrize("name", ORIGINALS)
def test_byte_level_tokenizers(name: str, tmp_path: Path) -> None:
    """LDG-12."""
    original, tokens, merges = trained(ORIGINALS[name])
    ours = Tokenizer.load(folder_of(byte_level(name, tokens, merges), tmp_path))
    for text in TEXTS:
        expected = original.encode(text, add_special_tokens=False).ids
        assert ours.encode(text, add_special_tokens=False) == expected, text
        assert ours.decode(expected, skip_special_tokens=False) == original.decode(expected, skip_special_tokens=False)
    first = [tokens.index(SPECIAL[0])] if name in ("llama-bpe", "tekken") else []
    assert ours.encode("x") == [*first, *original.encode("x", add_special_tokens=False).ids]
    assert ours.special_token(tokens.index(SPECIAL[1])) == SPECIAL[1]
    assert ours.special_token(tokens.index(ADDED[0])) is None


def sentence_piece(*, prefix: bool, user_defined: Sequence[str] = ()) -> sentencepiece.SentencePieceProcessor:
    written = io.BytesIO()
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter([text for text in CORPUS if text.strip() and "\0" not in text]),
        model_writer=written,
        model_type="bpe",
        vocab_size=600,
        byte_fallback=True,
        split_digits=True,
        allow_whitespace_only_pieces=True,
        add_dummy_prefix=prefix,
        remove_extra_whitespaces=False,
        normalization_rule_name="identity",
        control_symbols=list(SPECIAL),
        user_defined_symbols=list(user_defined),
        minloglevel=2,
    )
    return sentencepiece.SentencePieceProcessor(model_proto=written.getvalue())


def of_sentence_piece(
    model: sentencepiece.SentencePieceProcessor, user_defined: Sequence[str] = (), **more: Any
) -> dict[str, Any]:
    """Return the vocabulary as the usual converter writes it."""
    tokens, types = [], []
    for id in range(model.vocab_size()):
        token, type = model.id_to_piece(id), TokenType.NORMAL
        if model.is_unknown(id):
            type = TokenType.UNKNOWN
        elif model.is_control(id):
            type = TokenType.CONTROL
        elif model.is_byte(id):
            type = TokenType.BYTE
        elif token in user_defined:
            token, type = token.replace("▁", " "), TokenType.USER_DEFINED
        tokens.append(token)
        types.append(type)
    return {
        "model": "llama",
        "pre": "default",
        "token_list": tokens,
        "token_types": types,
        "token_scores": [model.get_score(id) for id in range(model.vocab_size())],
        "bos_token_id": model.bos_id(),
        "eos_token_id": model.eos_id(),
        "unk_token_id": model.unk_id(),
        **more,
    }


def expected_ids(model: sentencepiece.SentencePieceProcessor, text: str) -> list[int]:
    """Return SentencePiece's ids, encoding the parts between special tokens one by one, as it knows none itself."""
    ids: list[int] = []
    for part in re.split("(" + "|".join(map(re.escape, SPECIAL)) + ")", text):
        ids += [model.piece_to_id(part)] if part in SPECIAL else model.encode(part)
    return ids


@pytest.mark.parametrize("prefix", [True, False], ids=["as Llama 2", "as Gemma"])
def test_sentence_piece_tokenizers(prefix: bool, tmp_path: Path) -> None:
    """LDG-12."""
    added = [] if prefix else [text.replace(" ", "▁") for text in ADDED]
    model = sentence_piece(prefix=prefix, user_defined=added)
    more = {} if prefix else {"add_space_prefix": False}
    ours = Tokenizer.load(folder_of(of_sentence_piece(model, added, **more), tmp_path))
    for text in TEXTS:
        if "\0" in text:
            continue  # where SentencePiece itself stops reading
        expected = expected_ids(model, text)
        assert ours.encode(text, add_special_tokens=False) == expected, text
        assert ours.encode(text) == [model.bos_id(), *expected]
        if not any(token in text for token in SPECIAL):
            assert ours.decode(expected) == text.replace("▁", " ")
    assert len({id for text in TEXTS for id in ours.encode(text)}) > 300


def test_text_after_mistrals_instruction_tokens_gets_no_space(tmp_path: Path) -> None:
    model = sentence_piece(prefix=True)
    vocabulary = of_sentence_piece(model)
    vocabulary["token_list"][model.piece_to_id(SPECIAL[0])] = "[INST]"
    ours = Tokenizer.load(folder_of(vocabulary, tmp_path))
    assert ours.encode("Hello", add_special_tokens=False) == model.encode("Hello")
    instruction = model.piece_to_id(SPECIAL[0])
    assert ours.encode("[INST] Hello", add_special_tokens=False) == [instruction, *model.encode("Hello")]


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"pre": "falcon"}, r"tokenizer\.ggml\.pre 'falcon' is not known here \(known: gpt-2, .*--tokenizer"),
        ({"model": "t5"}, r"tokenizer\.ggml\.model 't5' is not known here.*--tokenizer"),
        ({"token_list": ["a"] * 131}, "has a token twice"),
        ({"token_merges": ["a b"]}, "merges: 'a b' is not two tokens that make a third one"),
        ({"token_merges": ["z z", "ab"]}, r"no tokenizer can be made of [^\n]*merges: 'ab' is not two tokens"),
        ({"eos_token_id": 131}, "eos_token_id is 131, and it has 131 tokens"),
    ],
)
def test_a_tokenizer_that_would_be_a_guess_needs_the_original(
    changes: dict[str, Any], message: str, tmp_path: Path
) -> None:
    """LDG-12."""
    folder = folder_of(plain_vocabulary(131) | changes, tmp_path)
    for ask in (check_tokenizer_files, Tokenizer.load):
        with pytest.raises(ModelError, match=message):
            ask(folder)


MISSING = {
    "merges": (None, "tokenizer.ggml.merges is missing or empty"),
    "merges, empty": (None, "tokenizer.ggml.merges is missing or empty"),
    "token_type": (None, "tokenizer.ggml.token_type has 0 types, and there are 131 tokens"),
    "token_type, short": ([1] * 130, "tokenizer.ggml.token_type has 130 types, and there are 131 tokens"),
    "token_type, long": ([1] * 132, "tokenizer.ggml.token_type has 132 types, and there are 131 tokens"),
    "tokens": (None, "tokenizer.ggml.tokens is missing or empty"),
    "tokens, empty": (None, "tokenizer.ggml.tokens is missing or empty"),
    "scores": (None, "tokenizer.ggml.scores has 0 scores, and there are 131 tokens"),
    "scores, short": ([0.5] * 130, "tokenizer.ggml.scores has 130 scores, and there are 131 tokens"),
    "scores, none a number": ([math.nan] * 131, "tokenizer.ggml.scores has a score that is no finite number"),
}


@pytest.mark.parametrize(
    ("kind", "case"),
    [("gpt2", case) for case in MISSING if "scores" not in case]
    + [("llama", case) for case in MISSING if "merges" not in case],
)
def test_a_vocabulary_that_lacks_a_part_needs_the_original(kind: str, case: str, tmp_path: Path) -> None:
    """LDG-12."""
    key, (value, message) = case.partition(",")[0], MISSING[case]
    vocabulary = plain_vocabulary(131) | {"model": kind, "token_scores": [0.5] * 131}
    extra = {f"tokenizer.ggml.{key}": value}
    file = write(llama(num_hidden_layers=1), tmp_path / "model.gguf", vocabulary=vocabulary, extra=extra)
    if "empty" in case:
        file.write_bytes(with_key(file.read_bytes(), f"tokenizer.ggml.{key}", EMPTY))
    with pytest.raises(
        ModelError, match=f"^no tokenizer can be made of {file}: {re.escape(message)}; name.*--tokenizer$"
    ):
        Tokenizer.load(model_folder(file, tmp_path / "cache"))


def test_tokens_that_end_a_turn_end_an_answer(tmp_path: Path) -> None:
    vocabulary = plain_vocabulary(131)
    vocabulary["token_list"][5:7] = ["<|im_end|>", "<|eot_id|>"]
    vocabulary["token_types"][5:7] = [TokenType.CONTROL, TokenType.NORMAL]
    vocabulary |= {"bos_token_id": 7, "eos_token_id": 9, "eot_token_id": 8}
    vocabulary |= {"add_bos_token": True, "add_eos_token": True}
    ours = Tokenizer.load(folder_of(vocabulary, tmp_path))
    assert ours.eos_token_ids == (9, 8, 5)
    assert ours.encode("AB") == [7, 32, 33, 9]
    assert ours.encode("AB", add_special_tokens=False) == [32, 33]


@pytest.mark.parametrize("key", ["eot_token_id", "eom_token_id"])
def test_an_end_that_the_model_does_not_have_is_ignored(
    key: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    vocabulary = plain_vocabulary(131) | {"eos_token_id": 9}
    file = write(llama(), tmp_path / "model.gguf", vocabulary=vocabulary, extra={f"tokenizer.ggml.{key}": 2**32 - 1})
    assert Tokenizer.load(model_folder(file, tmp_path / "cache")).eos_token_ids == (9,)
    assert f"{file}: tokenizer.ggml.{key} 4294967295 is ignored: the model has 131 tokens" in caplog.text


def test_the_embedded_models_ids_do_not_change() -> None:
    """The expected ids are those of the tokenizer that was compared with its makers' own."""
    ours = Tokenizer.load(locate(""))
    ids = [ours.encode(text) for text in TEXTS]
    assert hashlib.sha256(json.dumps(ids).encode()).hexdigest()[:16] == "b754b93fb17efa04"
