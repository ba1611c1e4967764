"""Tests structured output of the offline `LLM`: what it demands holds, and an output that fails ends alone."""

import json
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import pytest

from quire import LLM, SamplingParams, StructuredOutputsParams
from shared.errors import InvalidRequest
from shared.text.grammars import Compiled, GrammarCompiler

EXPENSIVE = r"x(\w{1,300}|[a-z0-9]{0,700}b){1,100}"
"""An expression that exceeds a limit after some tokens."""


@pytest.fixture(scope="module")
def llm(folder: Path) -> Iterator[LLM]:
    with LLM(folder, kv_cache_memory=0.05, num_threads=1) as llm:
        yield llm


def bound(max_tokens: int = 60, **demand: Any) -> SamplingParams:
    return SamplingParams(max_tokens=max_tokens, temperature=1.0, structured_outputs=StructuredOutputsParams(**demand))


def test_outputs_have_the_demanded_form(llm: LLM) -> None:
    schema = {
        "type": "object",
        "properties": {"a": {"type": "boolean"}},
        "required": ["a"],
        "additionalProperties": False,
    }
    params = [bound(json=schema, disable_any_whitespace=True), bound(choice=["one", "two"]), bound(regex="[ab]{3}")]
    whole, choice, letters = (output.outputs[0].text for output in llm.generate(["a"] * 3, params, use_tqdm=False))
    assert json.loads(whole)["a"] in (True, False)
    assert choice in ("one", "two")
    assert len(letters) == 3


def test_the_form_of_a_chats_answer_begins_behind_its_reasoning(folder: Path) -> None:
    template = (
        "{% for m in messages %}[{{ m.role }}] {{ m.content }}\n{% endfor %}"
        "{% if add_generation_prompt %}<think>\n{% if quick %}</think>{% endif %}{% endif %}"
    )
    messages, params = [{"role": "user", "content": "one?"}], bound(choice=["one", "two"])
    with LLM(folder, chat_template=template, kv_cache_memory=0.05, num_threads=1) as llm:
        (thinking,) = llm.chat(messages, params, use_tqdm=False)
        (quick,) = llm.chat(messages, params, use_tqdm=False, chat_template_kwargs={"quick": True})
    assert thinking.outputs[0].text not in ("one", "two"), "it is free until the reasoning ends"
    assert quick.outputs[0].text.strip() in ("one", "two")
    with LLM(folder, chat_template=template, reasoning_parser="none", kv_cache_memory=0.05, num_threads=1) as llm:
        (output,) = llm.chat(messages, params, use_tqdm=False)
    assert output.outputs[0].text in ("one", "two")


def test_an_output_that_cannot_go_on_ends_alone(llm: LLM) -> None:
    """The others of the batch are as they would be without it, and nothing is raised."""
    params = [SamplingParams(max_tokens=20, seed=1), bound(100, regex=EXPENSIVE), bound(choice=["one", "two"])]
    free, failed, choice = (output.outputs[0] for output in llm.generate(["a"] * 3, params, use_tqdm=False))
    assert failed.finish_reason == "error"
    assert "the grammar cannot be followed" in str(failed.error)
    assert failed.text.startswith("x")
    assert (free.finish_reason, free.error) == ("length", None)
    assert choice.text in ("one", "two")
    (alone,) = llm.generate(["a"], params[0], use_tqdm=False)
    assert alone.outputs[0].token_ids == free.token_ids


def test_samples_of_a_grammar_share_what_is_compiled(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    compiled: list[str] = []
    start = GrammarCompiler.start

    def count(compiler: GrammarCompiler, grammar: str, is_needed: Callable[[], bool]) -> Future[Compiled | None]:
        compiled.append(grammar)
        return start(compiler, grammar, is_needed)

    monkeypatch.setattr(GrammarCompiler, "start", count)
    demand = StructuredOutputsParams(regex="[cd]{2}")
    params = SamplingParams(max_tokens=9, n=8, structured_outputs=demand)
    (output,) = llm.generate(["a"], params, use_tqdm=False)
    assert {len(one.text) for one in output.outputs} == {2}
    assert len(compiled) == 1, "one thread computes"


def test_a_wrong_demand_is_refused_before_anything_runs(llm: LLM) -> None:
    with pytest.raises(InvalidRequest, match="unclosed"):
        llm.generate(["a", "a"], [SamplingParams(max_tokens=1), bound(regex="[")], use_tqdm=False)
