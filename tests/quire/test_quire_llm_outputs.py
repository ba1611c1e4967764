"""Tests that outputs of `LLM` do not depend on how they are computed, and that forms hold whatever else is asked for.

A prompt may come in chunks, be found in the prefix cache, or be shared by several samples.
"""

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import tokenizers
import torch
from tokenizers import processors
from transformers import OPTForCausalLM

from quire import LLM, SamplingParams
from quire.outputs import RequestOutput
from shared.errors import InvalidRequest
from shared.structured_outputs import StructuredOutputsParams

SMALL: dict[str, Any] = {"kv_cache_memory": 0.05, "num_threads": 1}
BLOCK = 16


@pytest.fixture(scope="module")
def llm(folder: Path) -> Iterator[LLM]:
    with LLM(folder, **SMALL) as llm:
        yield llm


def ask(llm: LLM, prompt: Any, **params: Any) -> RequestOutput:
    (output,) = llm.generate([prompt], SamplingParams(**params), use_tqdm=False)
    return output


def prompt_of(length: int) -> list[int]:
    """Return a prompt that begins with a special token."""
    return [0, *((7 * at) % 250 + 3 for at in range(length - 1))]


def scores(output: RequestOutput) -> list[float]:
    """Return the log-probabilities of the prompt's tokens but the first, which has none."""
    assert output.prompt_logprobs is not None
    first, *others = output.prompt_logprobs
    assert first is None
    return [
        entry[id].logprob for id, entry in zip(output.prompt_token_ids[1:], others, strict=True) if entry is not None
    ]


@pytest.mark.parametrize(("length", "max_tokens"), [(1, 0), (1, 1), (BLOCK, 0), (BLOCK, 1), (127, 1), (128, 0)])
def test_prompts_of_any_length_are_scored(llm: LLM, folder: Path, length: int, max_tokens: int) -> None:
    """LGP-02, LGP-04: as a forward pass of transformers scores them; a context is full with the prompt alone."""
    prompt = prompt_of(length)
    output = ask(llm, prompt, temperature=0, max_tokens=max_tokens, prompt_logprobs=1)
    with torch.inference_mode():
        logits = OPTForCausalLM.from_pretrained(folder)(torch.tensor([prompt])).logits[0].log_softmax(-1)
    expected = [logits[at, token].item() for at, token in enumerate(prompt[1:])]
    assert scores(output) == pytest.approx(expected, abs=1e-4)
    assert len(output.outputs[0].token_ids) == max_tokens
    assert output.outputs[0].finish_reason == "length"


def test_a_prompt_that_is_cached_is_scored_all_the_same(llm: LLM) -> None:
    """LGP-06: twice, then without its scores, and then with them again."""
    prompt = prompt_of(3 * BLOCK + 5)
    first, second = (ask(llm, prompt, temperature=0, max_tokens=4, prompt_logprobs=2) for _ in range(2))
    cached = ask(llm, prompt, temperature=0, max_tokens=4)
    last = ask(llm, prompt, temperature=0, max_tokens=4, prompt_logprobs=2)
    assert cached.num_cached_tokens == 3 * BLOCK
    assert first.prompt_logprobs == second.prompt_logprobs == last.prompt_logprobs
    assert len(scores(first)) == len(prompt) - 1
    assert len({tuple(output.outputs[0].token_ids) for output in (first, second, cached, last)}) == 1


def test_a_prompt_in_chunks_is_scored_once_and_alike(llm: LLM, folder: Path) -> None:
    """LGP-08: while others decode."""
    params = {"temperature": 0, "max_tokens": 4}
    expected = ask(llm, prompt_of(120), **params, prompt_logprobs=1)
    with LLM(folder, **SMALL, max_num_batched_tokens=32, max_num_seqs=8) as chunked:
        others = SamplingParams(temperature=0, max_tokens=60, ignore_eos=True)
        scored = SamplingParams(**params, prompt_logprobs=1)
        *_, output = chunked.generate(["one", "two", prompt_of(120)], [others, others, scored], use_tqdm=False)
    assert len(scores(output)) == 119
    assert scores(output) == pytest.approx(scores(expected), abs=1e-5)
    assert output.outputs[0].token_ids == expected.outputs[0].token_ids


@pytest.mark.parametrize("n", [1, 2])
def test_a_repetition_penalty_has_its_effect_in_every_mode(llm: LLM, folder: Path, n: int) -> None:
    """SMP-14: it counts the prompt's tokens, whether they are computed at once, in chunks or found in the cache."""
    prompt = prompt_of(2 * BLOCK + 3)
    greedy = {"temperature": 0, "max_tokens": 40, "ignore_eos": True, "n": n}

    def outputs(llm: LLM, penalty: float) -> list[list[int]]:
        output = ask(llm, prompt, **greedy, repetition_penalty=penalty)
        return [sample.token_ids for sample in output.outputs]

    plain, penalised = outputs(llm, 1.0), outputs(llm, 1.5)
    assert max(map(plain[0].count, plain[0])) > 4, "it loops"
    assert plain[0] != penalised[0]
    assert plain == [plain[0]] * n
    assert penalised == [penalised[0]] * n
    assert outputs(llm, 1.5) == penalised, "the prompt is cached now"
    for settings in ({"max_num_batched_tokens": 8, "max_num_seqs": 4}, {"enable_prefix_caching": False}):
        with LLM(folder, **SMALL, **settings) as other:
            assert outputs(other, 1.0) == plain
            assert [outputs(other, 1.5) for _ in range(2)] == [penalised] * 2


def test_four_samples_with_and_without_a_seed(llm: LLM) -> None:
    """SMP-03."""
    seeded = [ask(llm, "one", n=4, seed=1, temperature=1.0, max_tokens=20, ignore_eos=True) for _ in range(2)]
    free = [ask(llm, "one", n=4, temperature=1.0, max_tokens=20, ignore_eos=True) for _ in range(2)]
    runs = [[tuple(sample.token_ids) for sample in output.outputs] for output in (*seeded, *free)]
    assert all(len(set(samples)) == 4 for samples in runs)
    assert runs[0] == runs[1]
    assert len({*runs[0], *runs[2], *runs[3]}) == 12


def test_a_chat_and_a_prompt_begin_with_one_bos(folder: Path, tmp_path: Path) -> None:
    """TOK-01: the template prints it, and the tokenizer adds it to plain text; ids are taken as they are."""
    for path in folder.iterdir():
        (tmp_path / path.name).symlink_to(path)
    for name in ("tokenizer.json", "tokenizer_config.json"):
        (tmp_path / name).unlink()
    backend = tokenizers.Tokenizer.from_file(str(folder / "tokenizer.json"))
    backend.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 0)])
    backend.save(str(tmp_path / "tokenizer.json"))
    settings = {"bos_token": "<s>", "eos_token": "</s>", "chat_template": "{{ bos_token }}{{ messages[0].content }}"}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(settings))
    once = SamplingParams(max_tokens=1)
    with LLM(tmp_path, **SMALL) as llm:
        (chat,) = llm.chat([{"role": "user", "content": "Hi"}], once, use_tqdm=False)
        outputs = [chat, *llm.generate(["Hi", "<s>Hi", [5, 6]], once, use_tqdm=False)]
    assert [output.prompt_token_ids.count(0) for output in outputs] == [1, 1, 2, 0]
    assert outputs[0].prompt_token_ids[0] == 0
    assert outputs[-1].prompt_token_ids == [5, 6]


BOOLEAN = {"type": "boolean"}
OBJECT = {"type": "object", "properties": {"a": BOOLEAN}, "required": ["a"], "additionalProperties": False}


@pytest.mark.parametrize(
    ("schema", "values"),
    [(BOOLEAN, [True, False]), ({"enum": ["a"]}, ["a"]), (OBJECT, [{"a": True}, {"a": False}])],
    ids=str,
)
@pytest.mark.parametrize(
    "extra", [{}, {"min_tokens": 60}, {"ignore_eos": True}, {"logit_bias": "{}"}, {"stop_token_ids": "Z"}], ids=str
)
@pytest.mark.parametrize("temperature", [0, 1])
def test_a_form_holds_whatever_else_is_asked_for(
    llm: LLM, schema: Any, values: list[Any], extra: dict[str, Any], temperature: float
) -> None:
    """GDD-05: an output that is whole ends; nothing that a request adds leads out of its form."""
    encode = llm.get_tokenizer().encode
    if "logit_bias" in extra:  # against what the form needs
        extra = {"logit_bias": dict.fromkeys(encode('{}"truefalsea'), -100)}
    if "stop_token_ids" in extra:
        extra = {"stop_token_ids": encode("Z")}
    form = StructuredOutputsParams(json=schema)
    (sample,) = ask(
        llm, "one", structured_outputs=form, temperature=temperature, seed=1, max_tokens=110, **extra
    ).outputs
    assert json.loads(sample.text) in values
    assert (sample.finish_reason, sample.stop_reason) == ("stop", None)


def test_a_stop_token_inside_a_form_cuts_it(llm: LLM) -> None:
    """GDD-05: what came before is a beginning of the form."""
    (token,) = llm.get_tokenizer().encode("b")
    form = StructuredOutputsParams(regex="abc")
    (sample,) = ask(llm, "one", structured_outputs=form, stop_token_ids=[token], max_tokens=9).outputs
    assert (sample.text, sample.finish_reason, sample.stop_reason) == ("a", "stop", token)


@pytest.mark.parametrize("schema", [None, {"type": "array", "items": {"enum": [1, 22]}, "minItems": 1, "maxItems": 1}])
def test_a_model_that_likes_whitespace_gets_on(llm: LLM, schema: Any) -> None:
    """GDD-09: between the tokens of JSON it has a bound, so an answer gets done, or has content when it is cut."""
    blanks = {token for text in (" ", "  ", "\n", "\t") for token in llm.get_tokenizer().encode(text)}
    form = StructuredOutputsParams(json_object=True) if schema is None else StructuredOutputsParams(json=schema)
    params = {"structured_outputs": form, "logit_bias": dict.fromkeys(blanks, 20), "temperature": 1, "seed": 1}
    (sample,) = ask(llm, "one", max_tokens=120, **params).outputs
    if sample.finish_reason == "length":
        assert schema is None
        assert re.match(r'\s{0,32}\{\s{0,32}"', sample.text), "a key has begun"
    else:
        assert json.loads(sample.text) is not None
    assert not re.search(r"\s{33,}", sample.text.partition('"')[0])


@pytest.mark.parametrize("regex", ["[", "(?<=a)b", "*", "a(?=b)", "a" * 200_000], ids=lambda regex: regex[:9])
def test_a_wrong_expression_is_refused_before_anything_runs(
    llm: LLM, regex: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """GDD-02."""
    assert llm._engine is not None
    monkeypatch.setattr(llm._engine, "step", lambda: pytest.fail("something ran"))
    with pytest.raises(InvalidRequest) as caught:
        ask(llm, "one", structured_outputs=StructuredOutputsParams(regex=regex))
    assert caught.value.param == "structured_outputs"
    assert len(caught.value.message) < 1000
