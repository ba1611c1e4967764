"""Tests that a GGUF file is served with the tokenizer of another folder if none can be made from the file."""

import signal
from pathlib import Path

import pytest

from quire import LLM, SamplingParams
from quire.startup_checks import check_model
from shared.errors import ModelError
from shared.gguf.folder import model_folder
from shared.text.tokenizer import Tokenizer
from tests.gguf.gguf_writer import plain_vocabulary, write
from tests.models.tiny_models import llama
from tests.quire.quire_server import serving
from tests.quire.test_quire_serve import post
from tests.text.vocabulary import write_model_folder

GREEDY = SamplingParams(temperature=0, max_tokens=8)


@pytest.fixture
def texts(tmp_path: Path) -> Path:
    return write_model_folder(tmp_path / "texts")


@pytest.fixture
def file(texts: Path, tmp_path: Path) -> Path:
    size = Tokenizer.load(texts).vocab_size
    return write(llama(vocab_size=size), tmp_path / "m.gguf", vocabulary=plain_vocabulary(size) | {"pre": "strange"})


def test_it_answers_as_the_offline_class_does(
    file: Path, texts: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("QUIRE_CACHE", str(tmp_path / "cache"))
    messages = [{"role": "user", "content": "hello"}]
    with LLM(file, tokenizer=texts, kv_cache_memory=0.05, num_threads=1) as llm:
        expected = llm.chat(messages, GREEDY, use_tqdm=False)[0]
    with serving(file, tmp_path / "serve", f"--tokenizer={texts}") as server:
        body = {"model": "tiny", "messages": messages, "temperature": 0, "max_tokens": 8}
        answer = post(f"{server.url}/v1/chat/completions", body)
        assert answer["choices"][0]["message"]["content"] == expected.outputs[0].text
        assert answer["usage"]["prompt_tokens"] == len(expected.prompt_token_ids or [])
        assert server.stop(signal.SIGTERM) == 0


def test_without_one_the_start_says_what_is_missing(
    file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("QUIRE_CACHE", str(tmp_path / "cache"))
    with pytest.raises(ModelError, match=r"'strange' is not known here.*--tokenizer"):
        LLM(file)


def test_a_template_that_does_not_parse_is_found_before_anything_starts(tmp_path: Path) -> None:
    vocabulary = plain_vocabulary(131) | {"chat_template": "a\n{% endfor %}"}
    file = write(llama(), tmp_path / "m.gguf", vocabulary=vocabulary)
    folder = model_folder(file, tmp_path / "cache")
    with pytest.raises(ModelError, match=f"^{file}: the chat template is wrong in line 2"):
        check_model(folder)
    (tmp_path / "mine.jinja").write_text("{{ messages[0].content }}")
    check_model(folder, template=tmp_path / "mine.jinja")
