"""Tests a model without a family of Quire's own, over HTTP and through `LLM`."""

import json
import signal
import urllib.request
from pathlib import Path

import pytest
from transformers import PreTrainedModel

from quire import LLM, SamplingParams
from shared.errors import ConfigError
from tests.models.fallback_models import cohere2
from tests.models.tiny_models import reference_logits, save
from tests.quire.quire_server import serving
from tests.text.vocabulary import make_backend, write_model_folder

PROMPT = "user hello one two three"


@pytest.fixture(scope="module")
def model() -> PreTrainedModel:
    return cohere2(vocab_size=make_backend().get_vocab_size())


@pytest.fixture(scope="module")
def whole(model: PreTrainedModel, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the model's folder, with a tokenizer."""
    return save(model, write_model_folder(tmp_path_factory.mktemp("cohere2")))


def expected(model: PreTrainedModel, count: int) -> list[int]:
    """Return transformers' `count` greedy tokens, which may go on after the end of the text."""
    ids = make_backend().encode(PROMPT).ids
    existing = list(ids)
    for _ in range(count):
        existing.append(int(reference_logits(model, existing)[-1].argmax()))
    return existing[len(ids) :]


def test_it_is_served(model: PreTrainedModel, whole: Path, tmp_path: Path) -> None:
    body = {"model": "tiny", "prompt": PROMPT, "temperature": 0, "max_tokens": 12, "ignore_eos": True}
    with serving(whole, tmp_path) as server:
        request = urllib.request.Request(
            f"{server.url}/v1/completions", json.dumps(body).encode(), {"Content-Type": "application/json"}
        )
        with urllib.request.urlopen(request, timeout=60) as response:
            text = json.load(response)["choices"][0]["text"]
        assert server.stop(signal.SIGTERM) == 0
    assert text == make_backend().decode(expected(model, 12))
    assert "Traceback" not in server.err.read_text()


def test_offline(model: PreTrainedModel, whole: Path) -> None:
    params = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True)
    with LLM(whole, model_impl="auto", kv_cache_memory=0.01, num_threads=1) as llm:
        (output,) = llm.generate([PROMPT], params, use_tqdm=False)
    assert list(output.outputs[0].token_ids) == expected(model, 12)


def test_vllms_variable_for_batch_invariance_reaches_the_worker(whole: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It is refused with transformers' code. An argument wins over it."""
    monkeypatch.setenv("VLLM_BATCH_INVARIANT", "1")
    with pytest.raises(ConfigError, match="--batch-invariant needs a family of Quire's own"):
        LLM(whole, kv_cache_memory=0.01, num_threads=1)
    LLM(whole, kv_cache_memory=0.01, num_threads=1, batch_invariant=False).close()
