"""Tests the tokenizer of a model folder: ids, bytes, names and end-of-sequence tokens."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
import tokenizers
from tokenizers import AddedToken, decoders, models, normalizers

from shared.errors import InvalidRequest, ModelError
from shared.text.cut_text import CutText
from shared.text.tokenizer import MAX_JOINED, Tokenizer
from tests.text.vocabulary import KINDS, make_tokenizer, make_vocabulary, write_model_folder


def test_text_goes_to_ids_and_back() -> None:
    tokenizer = make_tokenizer()
    text = "hello 一二 👨‍👩‍👧 é"
    assert tokenizer.decode(tokenizer.encode(text)) == text


def test_a_long_text_comes_back_too() -> None:
    tokenizer = make_tokenizer()
    text = "hello é" * (MAX_JOINED // 3)
    ids = tokenizer.encode(text)
    assert len(ids) > MAX_JOINED
    assert tokenizer.decode(ids) == text


@pytest.mark.parametrize("bos", [False, True])
@pytest.mark.parametrize("add_special_tokens", [False, True])
def test_the_ids_are_those_of_the_librarys_plain_form(bos: bool, add_special_tokens: bool) -> None:
    tokenizer = make_tokenizer(bos=bos)
    texts = ["", "hello one two", "<|im_start|>user\nhé 一<|im_end|>", "preview " * 50]
    plain = [tokenizer.backend.encode(text, add_special_tokens=add_special_tokens).ids for text in texts]
    assert tokenizer.encode_all(texts, add_special_tokens) == plain
    assert [tokenizer.encode(text, add_special_tokens) for text in texts] == plain


def test_no_text_of_few_tokens_is_too_long() -> None:
    tokenizer = make_tokenizer()
    text = "<|im_start|>" * 5  # the longest token
    assert len(text) <= tokenizer.max_characters(len(tokenizer.encode(text))) < 10 * len(text)


@pytest.mark.parametrize("kind", KINDS)
def test_a_text_is_cut_where_no_token_may_reach_over(kind: str) -> None:
    """TOK-05: each piece is tokenized by itself, in every kind of vocabulary."""
    tokenizer = make_vocabulary(kind).tokenizer
    special = tokenizer.token_id("</s>")
    text = "</s></s>"
    assert tokenizer.encode(text, add_special_tokens=False).count(special) == 2
    for cuts, count in (((), 2), ((1,), 1), ((5,), 1), ((1, 5), 0), ((4,), 2), ((0, 8), 2)):
        cut = CutText(text, cuts)
        assert cut == text
        assert tokenizer.encode(cut, add_special_tokens=False).count(special) == count
        assert tokenizer.encode_all(["</s>", cut], add_special_tokens=False)[0] == [special]
    assert tokenizer.encode(CutText("", (0,)), add_special_tokens=False) == tokenizer.encode("", False)


def test_a_part_of_a_text_is_cut_where_the_text_is() -> None:
    """TOK-05."""
    text = CutText("one</s> two", (1, 4, 9))
    for part, pieces in ((text[3:], ["<", "/s> t", "wo"]), (text[:4], ["o", "ne<"]), (text[-7:], ["/s> t", "wo"])):
        assert isinstance(part, CutText)
        assert part.pieces == pieces
    assert type(str(text)) is str
    assert text[3] == "<"


def test_bos_comes_once_before_a_text_that_is_cut() -> None:
    """TOK-05."""
    tokenizer = make_tokenizer(bos=True)
    expected = [*tokenizer.encode("hello<"), *tokenizer.encode("s>", add_special_tokens=False)]
    assert tokenizer.encode(CutText("hello<s>", (6,))) == expected
    assert expected.count(tokenizer.token_id("<s>")) == 1


def test_bos_is_added_only_where_it_is_wanted() -> None:
    tokenizer = make_tokenizer(bos=True)
    bos = tokenizer.token_id("<s>")
    assert tokenizer.encode("hello")[0] == bos
    assert bos not in tokenizer.encode("hello", add_special_tokens=False)


def test_a_token_of_part_of_a_character_has_bytes_and_a_readable_name() -> None:
    tokenizer = make_tokenizer()
    ids = tokenizer.encode("é")
    assert b"".join(tokenizer.token_bytes(id) for id in ids) == "é".encode()
    assert tokenizer.token_text(ids[0]) == r"bytes:\xc3"
    assert tokenizer.token_text(tokenizer.encode("hello")[0]) == "hello"


def test_special_tokens_are_shown_by_name_and_unknown_ids_are_nothing() -> None:
    tokenizer = make_tokenizer()
    end = tokenizer.token_id("<|im_end|>")
    assert end is not None
    assert (tokenizer.token_text(end), tokenizer.special_token(end)) == ("<|im_end|>", "<|im_end|>")
    assert tokenizer.decode([10**6, *tokenizer.encode("hello")]) == "hello"
    assert tokenizer.token_bytes(10**6) == b""


def test_sentencepiece_pieces_become_bytes() -> None:
    vocab = {"<unk>": 0, "▁Hi": 1, "<0xF0>": 2}
    backend = tokenizers.Tokenizer(models.BPE(vocab=vocab, merges=[], unk_token="<unk>"))
    backend.decoder = decoders.Sequence([decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()])
    tokenizer = Tokenizer(backend)
    assert [tokenizer.token_bytes(id) for id in (1, 2)] == [b" Hi", b"\xf0"]


def test_a_text_knows_where_its_tokens_begin() -> None:
    """TXT-05: added tokens have no characters of the text, and the parts of a character have the same offset."""
    tokenizer = make_tokenizer(bos=True)
    text = "hello six<|im_end|> é\u4e00x"
    tokens = [tokenizer.token_text(id) for id in tokenizer.encode(text)]
    assert tokens[:4] == ["<s>", "hello", " six", "<|im_end|>"]
    assert tokenizer.token_offsets(text) == [0, 0, 5, 9, 19, 20, 20, 21, 21, 21, 22]
    assert tokenizer.token_offsets(text, add_special_tokens=False) == tokenizer.token_offsets(text)[1:]


def test_a_special_tokens_normalized_name_is_hidden_too() -> None:
    """TXT-05: the library shows special tokens whose name its normalizer changes."""
    vocab = {"<unk>": 0, "\u2581": 1, "a": 2, "</s>": 3}
    backend = tokenizers.Tokenizer(models.BPE(vocab=vocab, merges=[], unk_token="<unk>"))
    backend.normalizer = normalizers.Prepend("\u2581")
    backend.decoder = decoders.Sequence([decoders.Replace("\u2581", " "), decoders.ByteFallback(), decoders.Fuse()])
    backend.add_special_tokens([AddedToken("</s>", special=True, normalized=True)])
    assert Tokenizer(backend).decode([2, 3, 2]) == "aa"


def test_lone_surrogates_are_the_callers_fault() -> None:
    with pytest.raises(InvalidRequest, match="surrogate"):
        make_tokenizer().encode("a\ud800")


def test_ends_of_sequence_come_from_tokenizer_and_generation_config(tmp_path: Path) -> None:
    folder = write_model_folder(tmp_path, generation={"eos_token_id": [3, 1]})
    assert Tokenizer.load(folder).eos_token_ids == (1, 3)
    (folder / "generation_config.json").unlink()
    (folder / "config.json").write_text('{"eos_token_id": 2}')
    assert Tokenizer.load(folder).eos_token_ids == (1, 2)


@pytest.mark.parametrize(
    ("named", "kept"), [([2, 999], (1, 2)), ([999], (1, 3)), (999, (1, 3)), (-1, (1, 3)), (2**32 - 1, (1, 3))]
)
def test_ends_that_the_model_does_not_have_are_ignored(
    named: object, kept: tuple[int, ...], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """An engine would refuse every request with one of them in its `Sampling`."""
    folder = write_model_folder(tmp_path, generation={"eos_token_id": named})
    (folder / "config.json").write_text('{"vocab_size": 500, "eos_token_id": [3, 500]}')
    assert Tokenizer.load(folder).eos_token_ids == kept
    assert f"{folder / 'generation_config.json'}: eos_token_id [" in caplog.text
    assert "is ignored: the model has 500 tokens" in caplog.text


@pytest.mark.parametrize(
    ("named", "kept"),
    [("2", (1, 2)), (2.0, (1, 2)), ([None, 2], (1, 2)), (True, (1, 3)), ([[2]], (1, 3)), ({"id": 2}, (1, 3)),
     (["x", 2.5, "4"], (1, 4)), ([], (1, 3)), (10**400, (1, 3))],
)  # fmt: skip
def test_ends_may_be_written_in_odd_ways(named: object, kept: tuple[int, ...], tmp_path: Path) -> None:
    """LDG-28."""
    folder = write_model_folder(tmp_path, generation={"eos_token_id": named})
    (folder / "config.json").write_text('{"vocab_size": 300, "eos_token_id": "3"}')
    assert Tokenizer.load(folder).eos_token_ids == kept


@pytest.mark.parametrize("content", ["", "{", "[]", "5", "[" * 100_000, "\xff"])
def test_a_broken_generation_config_leaves_the_ends_to_config_json(
    content: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """LDG-28."""
    folder = write_model_folder(tmp_path)
    (folder / "config.json").write_text('{"eos_token_id": 3}')
    (folder / "generation_config.json").write_bytes(content.encode("latin-1"))
    assert Tokenizer.load(folder).eos_token_ids == (1, 3)
    assert caplog.text.count("generation_config.json") == 1


def test_without_a_config_the_tokenizers_size_counts(tmp_path: Path) -> None:
    folder = write_model_folder(tmp_path, generation={"eos_token_id": [2, 999]})
    (folder / "config.json").unlink(missing_ok=True)
    assert Tokenizer.load(folder).eos_token_ids == (1, 2)


def test_truncation_left_in_the_file_by_training_is_off(tmp_path: Path) -> None:
    folder = write_model_folder(tmp_path)
    backend = tokenizers.Tokenizer.from_file(str(folder / "tokenizer.json"))
    backend.enable_truncation(3)
    backend.save(str(folder / "tokenizer.json"))
    assert len(Tokenizer.load(folder).encode("abcdefgh")) == 8


def test_broken_files_are_named(tmp_path: Path) -> None:
    folder = write_model_folder(tmp_path)
    (folder / "tokenizer.json").write_text("{}")
    with pytest.raises(ModelError, match=r"tokenizer\.json"):
        Tokenizer.load(folder)
    write_model_folder(tmp_path)
    (folder / "config.json").write_text("[]")
    with pytest.raises(ModelError, match=r"config\.json"):
        Tokenizer.load(folder)


@pytest.mark.filterwarnings("ignore")  # transformers' own
def test_a_folder_without_tokenizer_json_is_converted_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("QUIRE_CACHE", str(tmp_path / "cache"))
    folder = write_model_folder(tmp_path / "model")
    model = json.loads((folder / "tokenizer.json").read_text())["model"]
    (folder / "tokenizer.json").unlink()
    (folder / "vocab.json").write_text(json.dumps(model["vocab"]))
    (folder / "merges.txt").write_text("#version: 0.2\n" + "\n".join(" ".join(pair) for pair in model["merges"]))
    settings = json.loads((folder / "tokenizer_config.json").read_text())
    (folder / "tokenizer_config.json").write_text(json.dumps(settings | {"tokenizer_class": "GPT2Tokenizer"}))
    (folder / "config.json").write_text('{"model_type": "gpt2"}')
    tokenizer = Tokenizer.load(folder)
    assert tokenizer.encode("hello") == make_tokenizer().encode("hello")
    (cached,) = (tmp_path / "cache" / "tokenizers").iterdir()
    written = cached.stat().st_mtime_ns
    assert Tokenizer.load(folder).encode("one two") == tokenizer.encode("one two")
    assert cached.stat().st_mtime_ns == written
    cached.unlink()
    cached.with_suffix(".partial").symlink_to("/dev/full")
    assert Tokenizer.load(folder).encode("one two") == tokenizer.encode("one two")
    assert "No space left on device); it is converted again at each start" in caplog.text


def test_a_folder_without_any_tokenizer_is_a_model_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("QUIRE_CACHE", str(tmp_path / "cache"))
    (tmp_path / "config.json").write_text('{"model_type": "llama"}')
    with pytest.raises(ModelError, match=r"tokenizer\.json"):
        Tokenizer.load(tmp_path)


def test_importing_text_brings_in_neither_torch_nor_transformers() -> None:
    code = (
        "import sys, shared.text.sample_text, shared.text.template, shared.text.sampling_defaults;"
        "print(sorted({'torch', 'transformers', 'aiohttp'} & set(sys.modules)))"
    )
    out = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert out.stdout.strip() == "[]"
