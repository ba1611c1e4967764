"""Tests the line in the log about an output of `LLM` that is empty, and that nothing else causes it."""

import logging
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import OPTForCausalLM

from quire import LLM, BeamSearchParams, SamplingParams, StructuredOutputsParams, template_hint

EOS = 2
MESSAGES = [{"role": "user", "content": "Hello, my name is"}]


@pytest.fixture(scope="module")
def llm(folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[LLM]:
    """Yield a model that ends whatever it gets: its last layer says the same everywhere, and EOS is what fits that."""
    silent = Path(shutil.copytree(folder, tmp_path_factory.mktemp("silent") / "model"))
    model = OPTForCausalLM.from_pretrained(silent)
    with torch.no_grad():
        norm, embeddings = model.model.decoder.final_layer_norm, model.model.decoder.embed_tokens.weight
        norm.weight.zero_()
        norm.bias.copy_(torch.linspace(-1, 1, len(norm.bias)))
        embeddings[EOS] = 5 * norm.bias
    model.save_pretrained(silent)
    with LLM(silent, kv_cache_memory=0.05, num_threads=1, dtype="float32") as llm:
        yield llm


@pytest.fixture(autouse=True)
def first_time() -> None:
    """Forget that the line was written."""
    template_hint.log_once.cache_clear()


def hints(caplog: pytest.LogCaptureFixture) -> list[logging.LogRecord]:
    return [record for record in caplog.records if record.name == template_hint.__name__]


def test_an_empty_output_of_a_chat_model_is_hinted_at_once(llm: LLM, caplog: pytest.LogCaptureFixture) -> None:
    for _ in range(2):
        outputs = llm.generate(["Hello, my name is", [5, 6, 7]], SamplingParams(temperature=0.7), use_tqdm=False)
        assert [output.outputs[0].text for output in outputs] == ["", ""]
    llm.enqueue("Hello")
    llm.wait_for_completion(use_tqdm=False)
    (record,) = hints(caplog)
    assert record.levelname == "WARNING"
    assert "LLM.chat does" in record.getMessage()


@pytest.mark.parametrize(
    "params",
    [
        {"stop_token_ids": [EOS]},
        {"ignore_eos": True},
        {"min_tokens": 1},
        {"logit_bias": {EOS: 1.0}},
        {"allowed_token_ids": [EOS]},
        {"bad_words": ["hello"]},
        {"structured_outputs": StructuredOutputsParams(regex="(one)?")},
        {"n": 2, "allowed_token_ids": [5, 6], "temperature": 1.0},
    ],
)
def test_what_the_request_asked_for_is_not(llm: LLM, caplog: pytest.LogCaptureFixture, params: dict[str, Any]) -> None:
    llm.generate("Hello", SamplingParams(**{"temperature": 0, "max_tokens": 2} | params), use_tqdm=False)
    assert hints(caplog) == []


def test_neither_chats_nor_beams_nor_prompts_with_markers_are(llm: LLM, caplog: pytest.LogCaptureFixture) -> None:
    (chat,) = llm.chat(MESSAGES, use_tqdm=False)
    assert chat.outputs[0].token_ids == [EOS]
    llm.enqueue_chat(MESSAGES)
    llm.wait_for_completion(use_tqdm=False)
    llm.beam_search("Hello", BeamSearchParams(beam_width=2, max_tokens=2))
    llm.generate("user: Hello</s>", use_tqdm=False)
    assert hints(caplog) == []
