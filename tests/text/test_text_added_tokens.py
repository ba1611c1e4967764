"""Tests that tokens which tokenizer.json lacks, and spaces before a text, are those of transformers' tokenizer."""

import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import tokenizers
from tokenizers import normalizers, pre_tokenizers

from shared.text.tokenizer import Tokenizer
from tests.text.vocabulary import make_backend, write_model_folder

pytestmark = pytest.mark.filterwarnings("ignore")  # transformers' own

SIZE = make_backend().get_vocab_size()
TEXTS = [
    "", "hello one two", " hello", "12 34", "<|new|> x<|extra|>y <plain> z<|old|>q", "hello<|im_end|>one  two",
    "see<|new|>\n<plain>hello", "</s><s>",
]  # fmt: skip
NEW = {"content": "<|new|>", "special": True, "normalized": False}
PLAIN = {"content": "<plain>", "special": False, "rstrip": True}
LISTED = {str(SIZE): NEW, str(SIZE + 1): PLAIN}
OLD = {"<plain>": SIZE + 1, "<|old|>": SIZE}
NAMED = {"extra_special_tokens": {"new_token": "<|new|>"}}
FAST = {"tokenizer_class": "PreTrainedTokenizerFast"}
GPT2 = {"tokenizer_class": "GPT2Tokenizer", "unk_token": "<s>"}


def write(folder: Path, settings: dict[str, Any], **files: dict[str, Any]) -> Path:
    """Write a model folder with these settings in its tokenizer_config.json, and other files by name, without .json."""
    write_model_folder(folder, template=None)
    path = folder / "tokenizer_config.json"
    path.write_text(json.dumps({"bos_token": "<s>", "eos_token": "</s>"} | settings))
    for name, content in files.items():
        (folder / f"{name}.json").write_text(json.dumps(content))
    return folder


def change(folder: Path, edit: Callable[[tokenizers.Tokenizer], object]) -> None:
    backend = tokenizers.Tokenizer.from_file(str(folder / "tokenizer.json"))
    edit(backend)
    backend.save(str(folder / "tokenizer.json"))


def assert_as_transformers(folder: Path) -> Tokenizer:
    from transformers import AutoTokenizer

    reference, tokenizer = AutoTokenizer.from_pretrained(str(folder)), Tokenizer.load(folder)
    for text in TEXTS:
        ids = reference.encode(text)
        assert tokenizer.encode(text) == ids, text
        assert tokenizer.encode(text, add_special_tokens=False) == reference.encode(text, add_special_tokens=False)
        for skip in (False, True):
            assert tokenizer.decode(ids, skip) == reference.decode(ids, skip_special_tokens=skip), text
    special = {id: token.content for id, token in reference.added_tokens_decoder.items() if token.special}
    assert {id: name for id in range(len(reference)) if (name := tokenizer.special_token(id))} == special
    assert tokenizer.vocab_size == len(reference)
    return tokenizer


@pytest.mark.parametrize(
    "config",
    [
        {},
        FAST,
        {"added_tokens_decoder": LISTED},
        {"added_tokens_decoder": dict(reversed(LISTED.items()))},
        {"added_tokens_decoder": {str(SIZE + 7): NEW}},
        {"added_tokens_decoder": {"3": NEW}},
        {"added_tokens_decoder": {str(SIZE - 1): {"content": "hello", "special": True, "normalized": False}}},
        {"added_tokens_decoder": {"3": {"content": "<|im_end|>", "special": True, "lstrip": True}}},
        {"added_tokens_decoder": {}, "additional_special_tokens": ["<|extra|>"]},
        {"added_tokens_decoder": LISTED, "additional_special_tokens": ["<|extra|>", "<plain>"]},
        {"additional_special_tokens": ["<|extra|>", {"__type": "AddedToken", "content": "<|new|>", "lstrip": True}]},
        {"extra_special_tokens": ["<|extra|>"]},
        {"extra_special_tokens": [], "additional_special_tokens": ["<|extra|>"]},
        NAMED | {"additional_special_tokens": ["<|extra|>"]},
        {"extra_special_tokens": {}, "additional_special_tokens": ["<|extra|>"]},
        {"extra_special_tokens": {"image_token": "<|extra|>"}},
        {"image_token": "<|extra|>", "add_bos_token": True},
        {"eos_token": "<|extra|>", "pad_token": "<|new|>", "sep_token": "<|old|>"},
        {"eos_token": {"__type": "AddedToken", "content": "<plain>", "lstrip": False}, "pad_token": None},
        {"eos_token": "<plain>", "added_tokens_decoder": LISTED},
        {"unk_token": "hello"},
        {"split_special_tokens": True},
        {"add_bos_token": True, "add_eos_token": True},
    ],
)
def test_tokens_of_tokenizer_config(config: dict[str, Any], tmp_path: Path) -> None:
    """LDG-29."""
    assert_as_transformers(write(tmp_path, config))


@pytest.mark.parametrize("config", [{}, {"additional_special_tokens": ["<|old|>"]}, {"pad_token": "<plain>"},
                                    {"added_tokens_decoder": LISTED}, NAMED,
                                    NAMED | {"additional_special_tokens": ["<|old|>"]}])  # fmt: skip
@pytest.mark.parametrize(
    "files",
    [
        {"added_tokens": OLD},
        {"special_tokens_map": {"additional_special_tokens": ["<|extra|>"]}},
        {"special_tokens_map": {"eos_token": "<|extra|>", "pad_token": {"content": "<|new|>", "lstrip": True}}},
        {"added_tokens": OLD, "special_tokens_map": {"additional_special_tokens": ["<|old|>"], "sep_token": "<plain>"}},
        {"added_tokens": {"<|im_end|>": 3, "<|new|>": 2}},
    ],
)
def test_tokens_of_older_files(config: dict[str, Any], files: dict[str, Any], tmp_path: Path) -> None:
    """LDG-29."""
    assert_as_transformers(write(tmp_path, config, **files))


def metaspace(backend: tokenizers.Tokenizer) -> None:
    backend.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="always")


def prepend(backend: tokenizers.Tokenizer) -> None:
    backend.normalizer = normalizers.Sequence([normalizers.Prepend("_")])
    backend.pre_tokenizer = None


def byte_level(backend: tokenizers.Tokenizer) -> None:
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=True)


def in_sequence(backend: tokenizers.Tokenizer) -> None:
    levels = [pre_tokenizers.Digits(), pre_tokenizers.ByteLevel(add_prefix_space=True, use_regex=False)]
    backend.pre_tokenizer = pre_tokenizers.Sequence(levels)


@pytest.mark.parametrize("asked", [{}, {"add_prefix_space": False}, {"add_prefix_space": True}])
@pytest.mark.parametrize(
    ("how", "config"), [(None, FAST), (None, GPT2), (byte_level, FAST), (byte_level, GPT2), (in_sequence, FAST)]
)
def test_a_space_before_a_text(
    how: Callable[[tokenizers.Tokenizer], None] | None,
    config: dict[str, Any],
    asked: dict[str, Any],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """LDG-29: the tokenizer's class decides if the setting counts."""
    monkeypatch.setenv("QUIRE_CACHE", str(tmp_path / "cache"))
    folder = write(tmp_path / "model", config | asked)
    if how is not None:
        change(folder, how)
    assert_as_transformers(folder)


@pytest.mark.parametrize("how", [metaspace, prepend])
def test_a_space_before_a_text_of_other_types(
    how: Callable[[tokenizers.Tokenizer], None], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """LDG-29."""
    monkeypatch.setenv("QUIRE_CACHE", str(tmp_path / "cache"))
    folder = write(tmp_path / "model", {"tokenizer_class": "LlamaTokenizer", "add_prefix_space": False})
    change(folder, how)
    assert_as_transformers(folder)


def test_transformers_is_asked_only_where_the_files_differ(tmp_path: Path) -> None:
    """LDG-29: its import takes seconds."""
    folder = write(tmp_path, {"added_tokens_decoder": LISTED, "add_prefix_space": False}, added_tokens=OLD)
    code = (
        "import sys; from pathlib import Path; from shared.text.tokenizer import Tokenizer;"
        "Tokenizer.load(Path(sys.argv[1])); print('transformers' in sys.modules)"
    )
    out = subprocess.run([sys.executable, "-c", code, str(folder)], capture_output=True, text=True, check=True)
    assert out.stdout.strip() == "False"


def test_where_transformers_fails_tokenizer_json_is_used(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """LDG-29."""
    monkeypatch.setenv("QUIRE_CACHE", str(tmp_path / "cache"))
    theirs = {"auto_map": {"AutoTokenizer": [None, "code.Mine"]}, "tokenizer_class": "Mine"}
    folder = write(tmp_path / "model", {"add_prefix_space": True, "pad_token": "<|new|>"} | theirs)
    assert Tokenizer.load(folder).encode("hello<|new|>") == [*make_backend().encode("hello").ids, SIZE]
    assert "tokenizer.json is used as it is" in caplog.text


def test_tokens_that_the_model_does_not_have_are_left_out(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """LDG-29: their ids would be beyond its embeddings."""
    config = {"added_tokens_decoder": LISTED, "additional_special_tokens": ["hello"]}
    folder = write(tmp_path, config, config={"vocab_size": SIZE + 1})
    tokenizer = Tokenizer.load(folder)
    assert tokenizer.token_id("<|new|>") == SIZE
    assert tokenizer.token_id("<plain>") is None
    assert tokenizer.special_token(tokenizer.encode("hello")[0]) == "hello"
    assert "tokens ['<plain>'] are left out: the model has only" in caplog.text


def test_an_entry_that_is_no_token_is_skipped(tmp_path: Path) -> None:
    """LDG-29."""
    config = {
        "added_tokens_decoder": {"x": NEW, "400": 5, "401": {"special": True}, "402": {"content": ""}, "403": PLAIN},
        "additional_special_tokens": [None, 5, {}, "", ["<|extra|>"]],
        "pad_token": 5,
        "unk_token": {"id": 3},
    }
    tokenizer = Tokenizer.load(write(tmp_path, config))
    assert (tokenizer.vocab_size, tokenizer.token_id("<plain>")) == (SIZE + 1, SIZE)
    assert (
        Tokenizer.load(write(tmp_path, {"added_tokens_decoder": 5, "additional_special_tokens": "x"})).vocab_size
        == SIZE
    )
