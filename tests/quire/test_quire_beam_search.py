"""Tests of `LLM.beam_search`."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from msgspec.structs import replace
from transformers import OPTForCausalLM

from quire import LLM, BeamSearchOutput, BeamSearchParams, SamplingParams, StructuredOutputsParams
from shared.errors import EngineFailure, InvalidRequest
from shared.protocol import FinishReason

PROMPTS = ["What is the capital of France?", "The quick brown fox"]


@pytest.fixture(scope="module")
def llm(folder: Path) -> Iterator[LLM]:
    with LLM(folder, dtype="float32", kv_cache_memory=0.05, num_threads=1) as llm:
        yield llm


def expected(folder: Path, ids: list[int], eos: int | None, **options: Any) -> list[list[int]]:
    model = OPTForCausalLM.from_pretrained(folder)
    settings = {"num_beams": 4, "num_return_sequences": 4, "max_new_tokens": 10, "early_stopping": "never"} | options
    result = model.generate(torch.tensor([ids]), do_sample=False, eos_token_id=eos, pad_token_id=1, **settings)
    return [[token for token in row if token != 1] for row in result.tolist()]


def test_its_beams_are_those_of_transformers(llm: LLM, folder: Path) -> None:
    tokenizer = llm.tokenizer
    for params, eos in (
        (BeamSearchParams(beam_width=4, max_tokens=10), tokenizer.eos_token_ids[0]),
        (BeamSearchParams(4, 10, ignore_eos=True, length_penalty=0.0), None),
    ):
        outputs = llm.beam_search(PROMPTS, params)
        for prompt, output in zip(PROMPTS, outputs, strict=True):
            ids = tokenizer.encode(prompt)
            found = [sequence.tokens for sequence in output.sequences]
            assert found == expected(folder, ids, eos, length_penalty=params.length_penalty)


def test_a_sequence_has_vllms_fields(llm: LLM) -> None:
    tokenizer = llm.tokenizer
    (output,) = llm.beam_search(PROMPTS[0], BeamSearchParams(beam_width=3, max_tokens=6, temperature=1.0))
    assert isinstance(output, BeamSearchOutput)
    ids = tokenizer.encode(PROMPTS[0])
    assert len(output.sequences) == 3
    for sequence in output.sequences:
        assert sequence.tokens[: len(ids)] == ids
        new = sequence.tokens[len(ids) :]
        assert sequence.finish_reason == "length"
        assert sequence.stop_reason is None
        assert sequence.text == tokenizer.decode(sequence.tokens, skip_special_tokens=True)
        assert sequence.text.startswith(PROMPTS[0])
        assert len(sequence.logprobs) == len(new) == 6
        for token, entries in zip(new, sequence.logprobs, strict=True):
            assert len(entries) == 4, "a beam more than there are stop tokens"
            assert entries[token].decoded_token == tokenizer.token_text(token)
        total = sum(entries[token].logprob for token, entries in zip(new, sequence.logprobs, strict=True))
        assert sequence.cum_logprob == pytest.approx(total)
    sums = [sequence.cum_logprob for sequence in output.sequences]
    assert sums == sorted(sums, reverse=True)


def test_log_probabilities_are_those_of_a_prompt_that_is_scored(llm: LLM) -> None:
    (output,) = llm.beam_search([PROMPTS[0]], BeamSearchParams(2, 5))
    for sequence in output.sequences:
        scored = llm.generate(sequence.tokens, SamplingParams(max_tokens=0, prompt_logprobs=1), use_tqdm=False)[0]
        assert scored.prompt_logprobs is not None
        pairs = zip(sequence.tokens[-5:], scored.prompt_logprobs[-5:], strict=True)
        values = [entries[token].logprob for token, entries in pairs if entries is not None]
        assert sequence.cum_logprob == pytest.approx(sum(values), abs=1e-3)


def test_a_stop_token_is_shown_on_demand(folder: Path) -> None:
    """With a tokenizer whose end-of-sequence token is one that the beams have."""
    with LLM(folder, dtype="float32", kv_cache_memory=0.05, num_threads=1) as llm:
        tokenizer = llm.tokenizer
        (plain,) = llm.beam_search(PROMPTS[0], BeamSearchParams(2, 5, ignore_eos=True))
        ids = tokenizer.encode(PROMPTS[0])
        stop = plain.sequences[0].tokens[len(ids) + 2]
        tokenizer.eos_token_ids = (stop,)
        for shown in (False, True):
            params = BeamSearchParams(2, 5, include_stop_str_in_output=shown, skip_special_tokens=False)
            (output,) = llm.beam_search(PROMPTS[0], params)
            stopped = [sequence for sequence in output.sequences if sequence.finish_reason == "stop"]
            assert stopped
            for sequence in stopped:
                assert sequence.tokens[-1] == sequence.stop_reason == stop
                visible = sequence.tokens if shown else sequence.tokens[:-1]
                assert sequence.text == tokenizer.decode(visible, skip_special_tokens=False)


def test_prompts_are_searched_together_or_a_few_at_a_time(llm: LLM) -> None:
    prompts: list[Any] = [*PROMPTS, {"prompt_token_ids": [5, 6, 7]}, [9, 8]]
    together = llm.beam_search(prompts, BeamSearchParams(3, 7))
    assert [output.sequences[0].tokens[:2] for output in together[2:]] == [[5, 6], [9, 8]]
    assert llm.beam_search(prompts, BeamSearchParams(3, 7), concurrency_limit=1) == together
    assert llm.beam_search(prompts, BeamSearchParams(3, 7), concurrency_limit=3, use_tqdm=True) == together
    assert llm.beam_search([], BeamSearchParams(3, 7)) == []


@pytest.mark.parametrize(
    ("prompts", "params", "options", "param"),
    [
        (PROMPTS, SamplingParams(), {}, "params"),
        (PROMPTS, BeamSearchParams(2, 0), {}, "max_tokens"),
        (PROMPTS, BeamSearchParams(2, 500), {}, "max_tokens"),
        (PROMPTS, BeamSearchParams(2, 5), {"concurrency_limit": 0}, "concurrency_limit"),
        ([[1], []], BeamSearchParams(2, 5), {}, "prompt"),
    ],
)
def test_what_is_wrong_is_named(llm: LLM, prompts: Any, params: Any, options: dict[str, Any], param: str) -> None:
    with pytest.raises(InvalidRequest) as error:
        llm.beam_search(prompts, params, **options)
    assert error.value.param == param


def test_a_form_of_the_output_is_refused() -> None:
    with pytest.raises(InvalidRequest, match="structured_outputs is not supported in a beam search"):
        BeamSearchParams(2, 5, structured_outputs=StructuredOutputsParams(choice=["a"]))


def test_after_an_interruption_the_engine_is_empty(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    params = BeamSearchParams(4, 8)
    before = llm.beam_search(PROMPTS, params)
    engine = llm._running()
    step, calls = engine.step, iter(range(5))

    def interrupted() -> Any:
        if next(calls, None) is None:
            raise KeyboardInterrupt
        return step()

    monkeypatch.setattr(engine, "step", interrupted)
    with pytest.raises(KeyboardInterrupt):
        llm.beam_search(PROMPTS, params)
    monkeypatch.undo()
    assert engine.engine.snapshot.running == engine.engine.snapshot.waiting == 0
    assert llm.beam_search(PROMPTS, params) == before


def test_a_branch_that_fails_ends_the_search_with_the_reason(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    """A search without it would have another result."""
    params, engine = BeamSearchParams(4, 8), llm._running()
    before, step = llm.beam_search(PROMPTS, params), engine.step

    def failing() -> Any:
        rows = step()
        return [replace(row, finish_reason=FinishReason.ERROR, detail="a reason") for row in rows]

    monkeypatch.setattr(engine, "step", failing)
    with pytest.raises(EngineFailure, match="a reason"):
        llm.beam_search(PROMPTS, params)
    monkeypatch.undo()
    assert engine.engine.snapshot.running == engine.engine.snapshot.waiting == 0
    assert llm.beam_search(PROMPTS, params) == before
