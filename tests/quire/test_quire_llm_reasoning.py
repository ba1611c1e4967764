"""Tests of `thinking_token_budget` in the offline `LLM`, with a tiny model whose tokenizer has marks of reasoning."""

import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest

from quire import LLM, SamplingParams, StructuredOutputsParams
from shared.errors import InvalidRequest
from tests.quire.conftest import CHAT_TEMPLATE

THINKS = CHAT_TEMPLATE.replace("> {% endif %}", "> <think>\n{% endif %}")
MESSAGES = [{"role": "user", "content": "one?"}]
PROMPTS = ["<think>", "The quick", "<think>a</think>b", "<think>a"]


@pytest.fixture(scope="module")
def thinking_folder(folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the folder of the tiny model, with tokens for `<think>` and `</think>`."""
    thinking = tmp_path_factory.mktemp("thinking") / "model"
    shutil.copytree(folder, thinking)
    for name in ("tokenizer.json", "tokenizer_config.json"):
        text = (folder / name).read_text().replace('"<s>"', '"<think>"').replace('"<pad>"', '"</think>"')
        (thinking / name).write_text(text)
    return thinking


@pytest.fixture(scope="module")
def llm(thinking_folder: Path) -> Iterator[LLM]:
    with LLM(thinking_folder, chat_template=THINKS, kv_cache_memory=0.05, num_threads=1) as llm:
        yield llm


def sampled(budget: int | None, **fields: Any) -> SamplingParams:
    """Return parameters with which the model rarely ends its reasoning by itself."""
    return SamplingParams(thinking_token_budget=budget, **{"max_tokens": 24, "seed": 3, "ignore_eos": True, **fields})


def chat(llm: LLM, params: SamplingParams) -> list[list[int]]:
    (output,) = llm.chat(MESSAGES, params, use_tqdm=False)
    return [sample.token_ids for sample in output.outputs]


def end_of(llm: LLM) -> int:
    end = llm.tokenizer.token_id("</think>")
    assert end is not None
    return end


@pytest.mark.parametrize("budget", [0, 1, 6])
def test_reasoning_ends_when_its_budget_is_spent(llm: LLM, budget: int) -> None:
    """Each sample's does, and it is the same up to there."""
    free, limited = (chat(llm, sampled(number, n=4)) for number in (None, budget))
    end = end_of(llm)
    assert not any(end in tokens for tokens in free), "so the ends are forced"
    assert [tokens.index(end) for tokens in limited] == [budget] * 4
    assert [tokens[:budget] for tokens in limited] == [tokens[:budget] for tokens in free]
    assert all(len(tokens) == 24 for tokens in limited)


def test_a_budget_that_is_not_spent_changes_nothing(llm: LLM) -> None:
    assert chat(llm, sampled(24)) == chat(llm, sampled(-1)) == chat(llm, sampled(None))


def test_a_demanded_form_begins_behind_it(llm: LLM) -> None:
    demand = StructuredOutputsParams(choice=["one", "two"])
    params = sampled(5, structured_outputs=demand, ignore_eos=False)
    (output,) = llm.chat(MESSAGES, params, use_tqdm=False)
    sample = output.outputs[0]
    assert sample.token_ids.index(end_of(llm)) == 5
    assert sample.finish_reason == "stop"
    assert llm.tokenizer.decode(sample.token_ids[6:]).strip() in ("one", "two")


def test_a_prompt_that_is_no_chats_may_end_inside_reasoning(llm: LLM, thinking_folder: Path) -> None:
    """In a pool that is too small for all, it is counted on after a preemption."""
    params = sampled(10, max_tokens=40)
    outputs = [output.outputs[0].token_ids for output in llm.generate(PROMPTS, params, use_tqdm=False)]
    end = end_of(llm)
    assert [tokens.index(end) if end in tokens else None for tokens in outputs] == [10, None, None, 10]
    with LLM(
        thinking_folder,
        num_gpu_blocks_override=12,
        block_size=8,
        max_num_seqs=8,
        num_threads=1,
        reasoning_parser="qwen3",
    ) as small:
        again = small.generate(PROMPTS, params, use_tqdm=False)
        assert small._engine is not None
        assert small._engine.engine.snapshot.preemptions > 0
    assert [output.outputs[0].token_ids for output in again] == outputs


def test_without_known_marks_of_reasoning_it_is_refused(folder: Path, thinking_folder: Path) -> None:
    for model, parser, words in (
        (thinking_folder, "auto", "no parser of reasoning"),
        (thinking_folder, "granite", "parser granite"),
        (folder, "qwen3", "parser qwen3"),
    ):
        with LLM(model, reasoning_parser=parser, kv_cache_memory=0.05, num_threads=1) as llm:
            for call in (lambda llm=llm: llm.generate("a", sampled(5)), lambda llm=llm: llm.chat(MESSAGES, sampled(5))):
                with pytest.raises(InvalidRequest, match=words) as caught:
                    call()
                assert caught.value.param == "thinking_token_budget"
            params = msgspec.structs.replace(sampled(-1), max_tokens=1)
            assert llm.generate("a", params, use_tqdm=False)
