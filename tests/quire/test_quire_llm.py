"""Tests of the offline `LLM`."""

import math
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
import torch
from transformers import OPTForCausalLM

from kernels.cpu import extension
from quire import LLM, RepetitionDetectionParams, SamplingParams
from services.worker.interface import PendingStep
from shared.errors import ConfigError, InvalidRequest, ModelError, QuireError
from shared.protocol import StepPlan
from shared.text.bad_words import tokenize_bad_words
from tests.models.gptq_awq_writer import Scheme, save_packed
from tests.models.squeezellm_writer import TableScheme, save_tables
from tests.text.vocabulary import make_vocabulary

PROMPTS = [
    "What is the capital of France?",
    "Explain the theory of relativity in simple terms.",
    "Write a short python code to reverse a string.",
]
GREEDY = SamplingParams(temperature=0, max_tokens=12)


@pytest.fixture(scope="module")
def llm(folder: Path) -> Iterator[LLM]:
    with LLM(folder, kv_cache_memory=0.05, num_threads=1) as llm:
        yield llm


def texts(llm: LLM, prompts: Any, params: Any, **options: Any) -> list[str]:
    return [output.outputs[0].text for output in llm.generate(prompts, params, use_tqdm=False, **options)]


def alone(llm: LLM, params: SamplingParams) -> list[str]:
    return [texts(llm, prompt, params)[0] for prompt in PROMPTS]


def test_a_batch_gives_each_prompt_what_it_gets_alone(llm: LLM) -> None:
    sampling_params = SamplingParams(temperature=0.8, top_p=0.95, max_tokens=20, seed=5)
    outputs = llm.generate(PROMPTS, sampling_params, use_tqdm=False)
    assert [output.prompt for output in outputs] == PROMPTS
    assert [output.outputs[0].text for output in outputs] == alone(llm, sampling_params)
    assert all(output.finished for output in outputs)


def test_it_continues_as_transformers_does(llm: LLM, folder: Path) -> None:
    model = OPTForCausalLM.from_pretrained(folder)
    ids = llm.tokenizer.encode(PROMPTS[0])
    expected = model.generate(torch.tensor([ids]), max_new_tokens=12, do_sample=False)[0, len(ids) :]
    assert llm.generate(PROMPTS[0], GREEDY, use_tqdm=False)[0].outputs[0].token_ids == expected.tolist()


@pytest.mark.parametrize(("prompt", "words"), [(PROMPTS[0], ["Pa is", "France is"]), (PROMPTS[1], ["FFF", "cap"])])
def test_bad_words_and_allowed_tokens_work_as_in_transformers(
    llm: LLM, folder: Path, prompt: str, words: list[str]
) -> None:
    """The model says the words if it may. Most are several tokens, of which the first ones may come."""
    model, tokenizer = OPTForCausalLM.from_pretrained(folder), llm.tokenizer
    ids = tokenizer.encode(prompt)

    def reference(**options: Any) -> list[int]:
        result = model.generate(torch.tensor([ids]), max_new_tokens=24, do_sample=False, **options)
        return list(result[0, len(ids) :].tolist())

    def tokens(**options: Any) -> list[int]:
        params = SamplingParams(temperature=0, max_tokens=24, **options)
        return llm.generate(prompt, params, use_tqdm=False)[0].outputs[0].token_ids

    assert all(word in tokenizer.decode(tokens()) for word in words)
    expected = reference(bad_words_ids=tokenize_bad_words(words, tokenizer))
    assert tokens(bad_words=words) == expected
    assert not any(word in tokenizer.decode(expected) for word in words)
    some = list(range(5, 60, 3))
    expected = reference(prefix_allowed_tokens_fn=lambda batch, seen: some)
    assert tokens(allowed_token_ids=some) == expected
    assert set(expected) <= set(some)
    both = tokens(allowed_token_ids=some, bad_words=words, logit_bias={some[0]: 100, 4: 100}, repetition_penalty=1.5)
    assert set(both) == {some[0]}


def test_samples_and_prompts_of_a_batch_have_their_own_bad_words(llm: LLM) -> None:
    """Neither n, penalties, preemptions nor neighbours matter: an output never has a bad word."""
    words = ["o", "th", "qu"]
    params = [
        SamplingParams(temperature=1.2, max_tokens=40, n=3, seed=at, ignore_eos=True, frequency_penalty=0.1, **fields)
        for at, fields in enumerate([{}, {"bad_words": words}, {"bad_words": ["e"]}])
    ]
    outputs = llm.generate(PROMPTS, params, use_tqdm=False)
    free, banned, other = [[one.token_ids for one in output.outputs] for output in outputs]
    sequences = tokenize_bad_words(words, llm.tokenizer)
    assert any(contains(ids, word) for ids in (*free, *other) for word in sequences)
    assert not any(contains(ids, word) for ids in banned for word in sequences)
    assert len({tuple(ids) for ids in banned}) == 3


def contains(ids: list[int], word: list[int]) -> bool:
    return any(ids[at : at + len(word)] == word for at in range(len(ids)))


def test_an_output_of_which_bad_words_leave_nothing_ends_alone_with_an_error(llm: LLM) -> None:
    digits = [id for id in range(320) if llm.tokenizer.decode([id]) in {"1", "2"}]
    params = SamplingParams(temperature=0, max_tokens=8, allowed_token_ids=digits, bad_words=["11", "12", "21", "22"])
    failed, whole = llm.generate(PROMPTS[:2], [params, GREEDY], use_tqdm=False)
    assert (failed.finished, failed.outputs[0].finish_reason) == (True, "error")
    assert "bad_words" in (failed.outputs[0].error or "")
    assert failed.outputs[0].text in ("1", "2")
    assert whole.outputs[0].error is None
    assert whole.outputs[0].text == alone(llm, GREEDY)[1]
    with pytest.raises(InvalidRequest, match="bad_words rule out"):
        llm.generate(PROMPTS[0], msgspec.structs.replace(params, bad_words=["1", "2"]), use_tqdm=False)
    assert texts(llm, PROMPTS[0], GREEDY) == alone(llm, GREEDY)[:1]


def test_prompts_come_as_text_ids_and_mappings(llm: LLM) -> None:
    ids = llm.tokenizer.encode(PROMPTS[0])
    forms: list[Any] = [ids, {"prompt": PROMPTS[0]}, {"prompt_token_ids": ids}, PROMPTS[0]]
    assert len(set(texts(llm, forms, GREEDY))) == 1
    assert texts(llm, ids, GREEDY) == texts(llm, PROMPTS[0], GREEDY)
    assert llm.generate([], GREEDY) == []
    (output,) = llm.generate(ids, GREEDY, use_tqdm=False)
    assert (output.prompt, output.prompt_token_ids) == (None, ids)


def test_each_prompt_may_have_its_own_parameters(llm: LLM) -> None:
    params = [SamplingParams(temperature=0, max_tokens=count) for count in (1, 5, 3)]
    outputs = llm.generate(PROMPTS, params, use_tqdm=False)
    assert [len(output.outputs[0].token_ids) for output in outputs] == [1, 5, 3]
    with pytest.raises(InvalidRequest, match="3 prompts, but 2 sampling_params"):
        llm.generate(PROMPTS, params[:2])


def test_a_stop_string_ends_the_text(llm: LLM) -> None:
    (whole,) = texts(llm, PROMPTS[0], GREEDY)
    stop = whole[len(whole) // 2 :][:3]
    before = whole[: whole.index(stop)]
    for include, expected in ((False, before), (True, before + stop)):
        params = msgspec.structs.replace(GREEDY, stop=[stop], include_stop_str_in_output=include)
        completion = llm.generate(PROMPTS[0], params, use_tqdm=False)[0].outputs[0]
        assert (completion.text, completion.finish_reason, completion.stop_reason) == (expected, "stop", stop)


def test_a_repetition_ends_it(llm: LLM) -> None:
    """The engine goes on with the next request, whose tokens are the same with and without the search."""
    entire = llm.generate("a", SamplingParams(temperature=0, max_tokens=12, ignore_eos=True))[0].outputs[0]
    bias = {entire.token_ids[0]: 100}  # from there on it is always this token
    detection = RepetitionDetectionParams(max_pattern_size=2, min_count=4)
    fields: dict[str, Any] = {"temperature": 0, "max_tokens": 12, "ignore_eos": True, "repetition_detection": detection}
    (repeats,) = llm.generate("a", SamplingParams(logit_bias=bias, **fields))[0].outputs
    assert repeats.token_ids == [entire.token_ids[0]] * 4
    assert (repeats.finish_reason, repeats.stop_reason) == ("repetition", "repetition_detected")
    (again,) = llm.generate("a", SamplingParams(temperature=0, max_tokens=12, ignore_eos=True))[0].outputs
    assert again.token_ids == entire.token_ids


def test_a_stop_token_ends_it_and_is_not_shown(llm: LLM) -> None:
    completion = llm.generate(PROMPTS[0], GREEDY, use_tqdm=False)[0].outputs[0]
    token = completion.token_ids[4]
    params = msgspec.structs.replace(GREEDY, stop_token_ids=[token])
    stopped = llm.generate(PROMPTS[0], params, use_tqdm=False)[0].outputs[0]
    end = completion.token_ids.index(token)
    assert stopped.token_ids == completion.token_ids[: end + 1]
    assert stopped.text == llm.tokenizer.decode(completion.token_ids[:end])
    assert (stopped.finish_reason, stopped.stop_reason) == ("stop", token)


def test_logprobs_name_the_token_and_its_rivals(llm: LLM) -> None:
    params = SamplingParams(temperature=0.7, logprobs=5, top_logprobs=5, max_tokens=6, seed=1)
    completion = llm.generate(["Hello, my name is"], params, use_tqdm=False)[0].outputs[0]
    assert completion.logprobs is not None
    for token, entry in zip(completion.token_ids, completion.logprobs, strict=True):
        assert 5 <= len(entry) <= 6
        best = max(entry.values(), key=lambda logprob: logprob.logprob)
        assert best.rank == 1
        assert entry[token].decoded_token == llm.tokenizer.token_text(token)
        assert sum(math.exp(logprob.logprob) for logprob in entry.values()) <= 1.0 + 1e-6
    chosen = [entry[token].logprob for token, entry in zip(completion.token_ids, completion.logprobs, strict=True)]
    assert completion.cumulative_logprob == pytest.approx(sum(chosen))
    plain = llm.generate("Hello", GREEDY, use_tqdm=False)[0].outputs[0]
    assert (plain.logprobs, plain.cumulative_logprob) == (None, None)


def test_named_tokens_are_scored_in_place_of_the_likeliest(llm: LLM) -> None:
    """Their log-probabilities are those that all tokens' lists would have."""
    named = [7, 300, 5]
    fields: dict[str, Any] = {"temperature": 0.7, "max_tokens": 6, "seed": 1, "n": 2}
    params = [
        SamplingParams(logprob_token_ids=named, logprobs=3, **fields),
        SamplingParams(logprobs=20, **fields),
        SamplingParams(logprob_token_ids=named, flat_logprobs=True, **fields),
    ]
    scored, likeliest, flat = llm.generate(["Hello, my name is"] * 3, params, use_tqdm=False)
    for completion, rivals, other in zip(scored.outputs, likeliest.outputs, flat.outputs, strict=True):
        assert completion.logprobs is not None
        assert rivals.logprobs is not None
        assert completion.token_ids == rivals.token_ids
        assert completion.logprobs == list(other.logprobs or ())
        assert completion.cumulative_logprob == rivals.cumulative_logprob
        for token, entry, listed in zip(completion.token_ids, completion.logprobs, rivals.logprobs, strict=True):
            assert list(entry) == list(dict.fromkeys([token, *named]))
            assert entry[token] == listed[token]
            for id in set(named) - {token}:
                assert entry[id].rank is None
                assert entry[id].decoded_token == llm.tokenizer.token_text(id)
                if id in listed:
                    assert entry[id].logprob == pytest.approx(listed[id].logprob, abs=1e-5)


def test_prompt_logprobs_score_the_prompt(llm: LLM, folder: Path) -> None:
    params = SamplingParams(temperature=0, max_tokens=1, prompt_logprobs=1)
    (output,) = llm.generate(PROMPTS[1], params, use_tqdm=False)
    ids = output.prompt_token_ids
    assert output.prompt_logprobs is not None
    assert output.prompt_logprobs[0] is None
    logits = OPTForCausalLM.from_pretrained(folder)(torch.tensor([ids])).logits[0]
    expected = logits.log_softmax(-1)[:-1].gather(1, torch.tensor(ids[1:])[:, None])[:, 0]
    logprobs = [entry[id].logprob for id, entry in zip(ids[1:], output.prompt_logprobs[1:], strict=True) if entry]
    assert logprobs == pytest.approx(expected.tolist(), abs=1e-4)


def test_no_request_fails_for_the_bytes_that_a_model_says(folder: Path, tmp_path: Path) -> None:
    """TXT-01: the prompt and the output are random byte-fallback tokens, with log-probabilities."""
    tokenizer = make_vocabulary("byte-fallback, stripped").tokenizer
    tokenizer.backend.save(str(tmp_path / "tokenizer.json"))
    prompts = [[7, *range(start, start + 9)] for start in range(70, 260, 20)]
    params = SamplingParams(temperature=2.0, max_tokens=60, seed=1, logprobs=0, prompt_logprobs=0, ignore_eos=True)
    with LLM(folder, tokenizer=tmp_path, kv_cache_memory=0.05, num_threads=1) as llm:
        outputs = llm.generate(prompts, params, use_tqdm=False)
    for prompt, output in zip(prompts, outputs, strict=True):
        (completion,) = output.outputs
        assert len(completion.token_ids) == 60
        before = tokenizer.decode(prompt, final=False)
        assert before + completion.text == tokenizer.decode([*prompt, *completion.token_ids])


def test_samples_differ_and_a_seed_repeats_them(llm: LLM) -> None:
    params = SamplingParams(n=3, seed=11, max_tokens=16)
    first, second = (llm.generate(PROMPTS[0], params, use_tqdm=False)[0].outputs for _ in range(2))
    assert [sample.index for sample in first] == [0, 1, 2]
    assert len({sample.text for sample in first}) == 3
    assert first == second


def test_unseeded_requests_follow_the_seed_of_the_llm(folder: Path) -> None:
    params = SamplingParams(max_tokens=16)
    runs = []
    for seed in (0, 0, 1):
        with LLM(folder, seed=seed, kv_cache_memory=0.05, num_threads=1) as llm:
            runs.append(texts(llm, [PROMPTS[0]] * 2, params))
    assert runs[0] == runs[1] != runs[2]
    assert runs[0][0] != runs[0][1]


def test_chat_renders_the_template(llm: LLM) -> None:
    messages = [{"role": "user", "content": "Hello!"}]
    (output,) = llm.chat(messages, GREEDY, use_tqdm=False)
    assert output.prompt == "[user] Hello!\n> "
    assert output.outputs[0].text == texts(llm, output.prompt, GREEDY)[0]
    two = llm.chat([messages, [*messages, {"role": "assistant", "content": "Hi."}]], GREEDY, use_tqdm=False)
    assert [output.prompt for output in two] == ["[user] Hello!\n> ", "[user] Hello!\n[assistant] Hi.\n> "]
    own = llm.chat(messages, GREEDY, use_tqdm=False, chat_template="{{ messages[0].content }}")
    assert own[0].prompt == "Hello!"


def test_one_bad_prompt_stops_the_call_before_anything_runs(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    assert llm._engine is not None
    with monkeypatch.context() as patch:
        patch.setattr(llm._engine, "step", lambda: pytest.fail("something ran"))
        bad: list[Any] = [[], [10**6], {"text": "x"}, {}, "x" * 1000, ["a"], [-1], [1.5], [True], [[1]], None, 5, 1.5,
                          {"prompt": 5}, {"prompt": None}, {"prompt_token_ids": "x"}, {"prompt_token_ids": 5}, b"x",
                          {1: 2}, np.array([1.0]), np.array([-1]), np.array([True]), np.zeros((1, 2), int),
                          torch.tensor([0.5]), torch.tensor(5), [np.float32(1)], [10**5000]]  # fmt: skip
        for prompt in bad:
            with pytest.raises(InvalidRequest):
                llm.generate([PROMPTS[0], prompt], GREEDY)
    assert texts(llm, PROMPTS, GREEDY) == alone(llm, GREEDY)


@pytest.mark.parametrize("prompts", [None, 5, 1.5, b"x", object(), {1, 2}, iter(["x"]), np.array(5)])
def test_what_are_no_prompts_is_refused(llm: LLM, prompts: Any) -> None:
    """API-01: an argument of a wrong type is an `InvalidRequest`, as over HTTP."""
    with pytest.raises(InvalidRequest, match="prompt"):
        llm.generate(prompts, GREEDY)


@pytest.mark.parametrize("params", [5, "x", {"n": 1}, [{"n": 1}], [None], [GREEDY, 5]])
def test_what_are_no_sampling_params_is_refused(llm: LLM, params: Any) -> None:
    """API-01: `sampling_params` of another type raise `InvalidRequest`."""
    with pytest.raises(InvalidRequest, match="sampling_params"):
        llm.generate("x", params)


@pytest.mark.parametrize(
    "arguments",
    [
        {"messages": None},
        {"messages": 5},
        {"messages": "hi"},
        {"messages": [5]},
        {"messages": [[5]]},
        {"messages": [[]]},
        {"chat_template": 5},
        {"chat_template_kwargs": [1]},
        {"chat_template_kwargs": {"messages": []}},
        {"add_generation_prompt": "no"},
        {"add_generation_prompt": False, "continue_final_message": 1},
    ],
)
def test_what_is_no_chat_is_refused(llm: LLM, arguments: dict[str, Any]) -> None:
    """API-01: `chat` raises `InvalidRequest` too."""
    with pytest.raises(InvalidRequest):
        llm.chat(**{"messages": [{"role": "user", "content": "Hello!"}], "sampling_params": GREEDY} | arguments)


def test_integer_arrays_are_taken_as_ids(llm: LLM) -> None:
    """API-01: numpy's and torch's integers, one prompt or several."""
    ids = llm.tokenizer.encode(PROMPTS[0])
    (expected,) = texts(llm, ids, GREEDY)
    for kind in (np.int64, np.int32, np.uint16):
        array = np.array(ids, kind)
        for form in (array, list(array), {"prompt_token_ids": array}, [array], array[None]):
            assert texts(llm, form, GREEDY) == [expected]
    tensor = torch.tensor(ids)
    for form in (tensor, list(tensor), {"prompt_token_ids": tensor}, [tensor], tensor[None]):
        assert texts(llm, form, GREEDY) == [expected]
    assert texts(llm, np.array([ids, ids]), GREEDY) == [expected] * 2
    (output,) = llm.generate(np.array(ids), GREEDY, use_tqdm=False)
    assert [type(token) for token in output.prompt_token_ids] == [int] * len(ids)


def test_an_interrupt_leaves_it_usable(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    expected = alone(llm, GREEDY)
    assert llm._engine is not None
    runner, num_steps = llm._engine.runner, 0

    class Interrupted:
        """A runner that raises `KeyboardInterrupt` in its fourth step."""

        def launch(self, plan: StepPlan) -> PendingStep:
            nonlocal num_steps
            num_steps += 1
            if num_steps == 4:
                raise KeyboardInterrupt
            return runner.launch(plan)

        configure = runner.configure

    with monkeypatch.context() as patch:
        patch.setattr(llm._engine, "runner", Interrupted())
        with pytest.raises(KeyboardInterrupt):
            llm.generate(PROMPTS, GREEDY, use_tqdm=False)
    assert not llm._engine.engine.unfinished
    assert texts(llm, PROMPTS, GREEDY) == expected


def test_a_pool_too_small_for_all_gives_the_same(llm: LLM, folder: Path) -> None:
    params = msgspec.structs.replace(GREEDY, max_tokens=40, ignore_eos=True)
    with LLM(folder, num_gpu_blocks_override=12, block_size=8, max_num_seqs=8, num_threads=1) as small:
        assert texts(small, PROMPTS, params) == alone(llm, params)
        assert small._engine is not None
        assert small._engine.engine.snapshot.preemptions > 0


def test_a_repeated_prompt_is_found_in_the_cache_unless_that_is_off(folder: Path) -> None:
    prompt = " ".join(PROMPTS)
    for caching in (True, False):
        with LLM(folder, kv_cache_memory=0.05, enable_prefix_caching=caching, num_threads=1) as llm:
            cached = [llm.generate(prompt, GREEDY, use_tqdm=False)[0].num_cached_tokens for _ in range(2)]
        assert cached[0] == 0
        assert (cached[1] > 0) is caching


def test_a_request_may_leave_the_cache_unread(folder: Path) -> None:
    prompt, unread = " ".join(PROMPTS), msgspec.structs.replace(GREEDY, skip_reading_prefix_cache=True)
    with LLM(folder, kv_cache_memory=0.05, num_threads=1) as llm:
        outputs = [llm.generate(prompt, params, use_tqdm=False)[0] for params in (unread, unread, GREEDY, unread)]
        assert [output.num_cached_tokens for output in outputs] == [0] * 4
        assert llm.generate(prompt, GREEDY, use_tqdm=False)[0].num_cached_tokens > 0
    assert len({tuple(output.outputs[0].token_ids) for output in outputs}) == 1


def test_prompts_of_one_salt_share_a_cache_until_it_is_reset(folder: Path) -> None:
    with LLM(folder, kv_cache_memory=0.05, num_threads=1) as llm:

        def cached(**salt: str) -> int:
            (output,) = llm.generate({"prompt": " ".join(PROMPTS), **salt}, GREEDY, use_tqdm=False)
            return output.num_cached_tokens

        assert [cached(), cached(cache_salt="a"), cached(cache_salt="b")] == [0, 0, 0]
        assert cached() == cached(cache_salt="a") == cached(cache_salt="b") > 0
        assert llm.reset_prefix_cache()
        assert [cached(), cached(cache_salt="a")] == [0, 0]
        assert cached() > 0
        with pytest.raises(InvalidRequest, match="cache_salt"):
            cached(cache_salt="")
    with pytest.raises(QuireError, match="closed"):
        llm.reset_prefix_cache()


def test_without_max_tokens_it_runs_to_the_end_of_the_context(folder: Path) -> None:
    with LLM(folder, max_model_len=40, kv_cache_memory=0.05, num_threads=1) as llm:
        params = SamplingParams(temperature=0, max_tokens=None, ignore_eos=True)
        (output,) = llm.generate(PROMPTS[0], params, use_tqdm=False)
        assert len(output.prompt_token_ids) + len(output.outputs[0].token_ids) == 40
        assert output.outputs[0].finish_reason == "length"
        with pytest.raises(InvalidRequest, match="40 tokens"):
            llm.generate(PROMPTS[0], SamplingParams(max_tokens=40))


def test_the_models_own_defaults_are_used(folder: Path, tmp_path: Path) -> None:
    for path in folder.iterdir():
        (tmp_path / path.name).symlink_to(path)
    (tmp_path / "generation_config.json").unlink(missing_ok=True)
    (tmp_path / "generation_config.json").write_text('{"temperature": 0.5, "top_k": 7, "max_new_tokens": 3}')
    with LLM(tmp_path, kv_cache_memory=0.05, num_threads=1) as llm:
        assert llm.get_default_sampling_params() == SamplingParams(temperature=0.5, top_k=7, max_tokens=3)
        assert len(llm.generate(PROMPTS[0], use_tqdm=False)[0].outputs[0].token_ids) <= 3


def test_progress_shows_speeds(llm: LLM, capsys: pytest.CaptureFixture[str]) -> None:
    llm.generate(PROMPTS, GREEDY)
    shown = capsys.readouterr().err
    assert "Processed prompts: 100%" in shown
    assert "toks/s" in shown
    llm.generate(PROMPTS, GREEDY, use_tqdm=False)
    assert capsys.readouterr().err == ""


@pytest.mark.skipif(not extension.load(), reason="the kernels are not compiled here")
@pytest.mark.parametrize("method", ["gptq", "squeezellm"])
def test_a_packed_checkpoint_is_served_in_its_own_bits_unless_a_type_is_named(
    method: str, folder: Path, tmp_path: Path
) -> None:
    with torch.no_grad():
        if method == "gptq":
            save_packed(OPTForCausalLM.from_pretrained(folder), tmp_path, Scheme())
        else:
            save_tables(OPTForCausalLM.from_pretrained(folder), tmp_path, TableScheme(outliers=0.01))
    for name in ("tokenizer.json", "tokenizer_config.json"):
        (tmp_path / name).write_bytes((folder / name).read_bytes())

    def scores(**settings: Any) -> list[float]:
        params = SamplingParams(temperature=0, max_tokens=1, prompt_logprobs=0)
        with LLM(tmp_path, kv_cache_memory=0.05, num_threads=1, **settings) as llm:
            (output,) = llm.generate(PROMPTS[0], params, use_tqdm=False)
        return [next(iter(entry.values())).logprob for entry in (output.prompt_logprobs or [])[1:]]

    own, floats = scores(), scores(dtype="float32")
    assert own == scores(quantization=method) == scores(quantization="auto")
    assert floats == scores(quantization="none")
    assert 0 < max(abs(one - other) for one, other in zip(own, floats, strict=True)) < 0.3


@pytest.mark.parametrize(
    ("argument", "value"),
    [
        ("tensor_parallel_size", 0),
        ("nnodes", 2),
        ("quantization", "gptq"),
        ("lora_modules", ["a=/a"]),
        ("no_such_argument", 1),
        ("block_size", 17),
        ("gpu_memory_utilization", 1.5),
        ("dtype", "int3"),
        ("seed", "x"),
        ("seed", 1.5),
        ("seed", True),
    ],
)
def test_what_cannot_be_honoured_is_refused(folder: Path, argument: str, value: Any) -> None:
    with pytest.raises(ConfigError, match=argument.replace("_", "[_-]")):
        LLM(folder, **{argument: value})


def test_a_missing_model_is_a_clear_error() -> None:
    with pytest.raises(ModelError, match="there is no folder /no/such/model"):
        LLM("/no/such/model")


def test_a_closed_llm_says_so(folder: Path) -> None:
    llm = LLM(folder, kv_cache_memory=0.05, num_threads=1)
    llm.close()
    with pytest.raises(QuireError, match="closed"):
        llm.generate("x")


def test_importing_quire_loads_neither_torch_nor_transformers() -> None:
    script = "import sys, quire, quire.cli; quire.SamplingParams; print({'torch', 'transformers'} & set(sys.modules))"
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    result = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True, env=environment)
    assert result.stdout.strip() == "set()"
