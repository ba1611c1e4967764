"""Tests of what vLLM's users call on `LLM` besides plain `generate`: every argument is honoured or refused by name."""

import inspect
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from tqdm import tqdm

from quire import (
    LLM,
    Counter,
    FlatLogprobs,
    Gauge,
    Histogram,
    RequestOutput,
    RequestOutputKind,
    SamplingParams,
    TextPrompt,
    TokensPrompt,
)
from quire.vllm import METHODS
from shared.errors import InvalidRequest, QuireError

PROMPTS = ["What is the capital of France?", "The quick brown fox", "Paris is"]
GREEDY = SamplingParams(temperature=0, max_tokens=8)
HELLO = [{"role": "user", "content": "Hello!"}]
TOOL = {
    "type": "function",
    "function": {
        "name": "get_weather",
        "description": "The weather of a city.",
        "parameters": {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]},
    },
}
TOOL_TEMPLATE = (
    "{% for t in tools %}{{ t.function.name }}: {{ t.function.parameters.required | tojson }}{{ '\n' }}{% endfor %}"
    "{% for m in messages %}[{{ m.role }}] {{ m.content }}"
    "{% for call in m.tool_calls %}{{ call.function.arguments.city }}{% endfor %}{{ '\n' }}"
    "{% endfor %}{% if add_generation_prompt %}> {% endif %}"
)


@pytest.fixture(scope="module")
def llm(folder: Path) -> Iterator[LLM]:
    with LLM(folder, kv_cache_memory=0.05, num_threads=1) as llm:
        yield llm


def texts(outputs: list[RequestOutput]) -> list[str]:
    return [output.outputs[0].text for output in outputs]


def greedy(llm: LLM, prompts: Any, **options: Any) -> list[RequestOutput]:
    return llm.generate(prompts, GREEDY, use_tqdm=False, **options)


@pytest.mark.parametrize("call", ["generate", "chat", "enqueue", "enqueue_chat"])
def test_an_argument_that_there_is_not_is_an_error(llm: LLM, call: str) -> None:
    prompt: Any = HELLO if "chat" in call else PROMPTS[0]
    with pytest.raises(TypeError, match="prioritie"):
        getattr(llm, call)(prompt, GREEDY, use_tqdm=False, prioritie=[1])


def test_what_is_enqueued_runs_together_later(llm: LLM) -> None:
    first = llm.enqueue(PROMPTS[:2], GREEDY)
    alone = greedy(llm, PROMPTS)  # meanwhile; it returns its own outputs only
    second = llm.enqueue_chat(HELLO, GREEDY)
    outputs = llm.wait_for_completion(use_tqdm=False)
    assert [output.request_id for output in outputs] == [*first, *second]
    assert texts(outputs[:2]) == texts(alone)[:2]
    assert texts(outputs[2:]) == texts(llm.chat(HELLO, GREEDY, use_tqdm=False))
    assert llm.wait_for_completion(use_tqdm=False) == []


def test_what_is_enqueued_keeps_its_parameters(llm: LLM) -> None:
    params = SamplingParams(temperature=0, max_tokens=3, ignore_eos=True, seed=1)
    llm.enqueue("Hello", params)
    params.max_tokens = 5
    llm.enqueue("Hello", params)
    outputs = llm.wait_for_completion((RequestOutput,), use_tqdm=False)
    assert [len(output.outputs[0].token_ids) for output in outputs] == [3, 5]
    params.max_tokens = -5
    with pytest.raises(InvalidRequest, match="max_tokens must be at least 0, got -5"):
        llm.enqueue("Hello", params)
    with pytest.raises(InvalidRequest, match="output_type must be RequestOutput"):
        llm.wait_for_completion(int)


def test_an_interrupt_drops_what_is_enqueued(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    llm.enqueue(PROMPTS, GREEDY)
    assert llm._engine is not None

    def interrupt() -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(llm._engine, "step", interrupt)
        with pytest.raises(KeyboardInterrupt):
            llm.wait_for_completion(use_tqdm=False)
    assert llm.wait_for_completion(use_tqdm=False) == []
    assert not llm._engine.engine.unfinished


def test_a_closed_llm_takes_nothing(folder: Path) -> None:
    with LLM(folder, kv_cache_memory=0.05, num_threads=1) as llm:
        llm.enqueue("x", GREEDY)
    for call in (lambda: llm.enqueue("x"), llm.wait_for_completion, llm.get_metrics, lambda: llm.chat(HELLO)):
        with pytest.raises(QuireError, match="closed"):
            call()


def test_prompts_as_vllms_types(llm: LLM) -> None:
    ids = llm.tokenizer.encode(PROMPTS[0])
    prompts = [TextPrompt(prompt=PROMPTS[0]), TokensPrompt(prompt_token_ids=ids, prompt="shown only")]
    outputs = greedy(llm, prompts)
    assert len(set(texts(outputs))) == 1
    assert [output.prompt for output in outputs] == [PROMPTS[0], "shown only"]


def test_results_have_vllms_fields(llm: LLM) -> None:
    (output,) = greedy(llm, PROMPTS[0])
    fields = "request_id prompt prompt_token_ids prompt_logprobs prompt_token_id_logprobs outputs finished metrics "
    fields += "lora_request encoder_prompt encoder_prompt_token_ids num_cached_tokens num_cache_creation_tokens "
    fields += "kv_transfer_params ec_transfer_params"
    assert all(hasattr(output, name) for name in fields.split())
    (sample,) = output.outputs
    fields = "index text token_ids cumulative_logprob logprobs routed_experts finish_reason stop_reason lora_request "
    fields += "sampling_mask spec_decode_metrics weight_versions"
    assert all(hasattr(sample, name) for name in fields.split())
    assert sample.finished()
    stats = output.metrics
    assert stats is not None
    assert stats.num_generation_tokens == len(sample.token_ids)
    assert 0 < stats.queued_ts <= stats.scheduled_ts <= stats.first_token_ts <= stats.last_token_ts
    assert 0 < stats.first_token_latency <= stats.last_token_ts - stats.queued_ts + 10
    assert stats.arrival_time > 1.6e9


def test_a_bar_is_made_by_the_caller(llm: LLM) -> None:
    bars: list[Any] = []

    def make(*args: Any, **options: Any) -> Any:
        bars.append(tqdm(*args, **options, leave=False))
        return bars[-1]

    llm.generate(PROMPTS, GREEDY, use_tqdm=make)
    assert [(bar.total, bar.n) for bar in bars] == [(3, 3)]


def test_priorities_order_what_waits(folder: Path, llm: LLM) -> None:
    settings: dict[str, Any] = {"kv_cache_memory": 0.05, "num_threads": 1, "max_num_seqs": 1}
    with LLM(folder, scheduling_policy="priority", **settings) as one:
        outputs = greedy(one, PROMPTS, priority=[3, 1, 2])
    first_tokens = [output.metrics.first_token_ts for output in outputs if output.metrics]
    assert sorted(range(3), key=first_tokens.__getitem__) == [1, 2, 0]
    assert texts(outputs) == texts(greedy(llm, PROMPTS, priority=[0, 0, 0]))
    with pytest.raises(InvalidRequest, match="priority needs LLM\\(scheduling_policy='priority'\\)"):
        greedy(llm, PROMPTS, priority=[3, 1, 2])
    for wrong in ([1], 5, [1.5, 0, 0], ["1", 0, 0]):
        with pytest.raises(InvalidRequest, match="priorit") as caught:
            greedy(llm, PROMPTS, priority=wrong)
        assert caught.value.param == "priority"


@pytest.mark.parametrize(
    ("name", "value"),
    [("mm_processor_kwargs", {"num_crops": 4})],
)
def test_what_is_not_supported_names_the_argument(llm: LLM, name: str, value: Any) -> None:
    for call in (llm.generate, llm.enqueue):
        with pytest.raises(InvalidRequest, match=f"{name} is not supported") as caught:
            call("x", **{name: value})
        assert caught.value.param == name
    for call in (llm.chat, llm.enqueue_chat):
        with pytest.raises(InvalidRequest, match=f"{name} is not supported"):
            call(HELLO, **{name: value})
    assert llm.generate("x", GREEDY, use_tqdm=False, lora_request=None, mm_processor_kwargs={})


def test_prompts_are_truncated_on_request(llm: LLM) -> None:
    prompt = PROMPTS[0]
    ids = llm.tokenizer.encode(prompt)
    for options, expected in (
        ({"truncate_prompt_tokens": 4}, ids[-4:]),
        ({"truncate_prompt_tokens": 4, "truncation_side": "right"}, ids[:4]),
        ({"truncate_prompt_tokens": 100}, ids),
    ):
        (output,) = greedy(llm, prompt, tokenization_kwargs=options)
        assert (output.prompt, output.prompt_token_ids) == (prompt, expected)
    params = SamplingParams(temperature=0, max_tokens=5, truncate_prompt_tokens=3)
    assert llm.generate([ids], params, use_tqdm=False)[0].prompt_token_ids == ids[-3:]
    long = [ids[0]] * 1000  # the context is 128
    params = SamplingParams(temperature=0, max_tokens=5, truncate_prompt_tokens=-1)
    assert len(llm.generate([long], params, use_tqdm=False)[0].prompt_token_ids) == 123
    (chat,) = llm.chat(HELLO, GREEDY, use_tqdm=False, tokenization_kwargs={"truncate_prompt_tokens": 2})
    assert chat.prompt_token_ids == llm.tokenizer.encode("[user] Hello!\n> ")[-2:]


@pytest.mark.parametrize("options", [{}, {"truncate_prompt_tokens": 3}])
def test_a_text_that_is_no_text_names_the_prompt(llm: LLM, options: dict[str, Any]) -> None:
    with pytest.raises(InvalidRequest, match=r"^prompt: .*surrogate") as caught:
        greedy(llm, ["x", "a\ud800"], tokenization_kwargs=options)
    assert caught.value.param == "prompt"


@pytest.mark.parametrize(
    ("options", "param"),
    [
        ({"truncate_prompt_tokens": 0}, "truncate_prompt_tokens"),
        ({"truncate_prompt_tokens": 121}, "truncate_prompt_tokens"),  # with 8 of max_tokens
        ({"truncate_prompt_tokens": "4"}, "truncate_prompt_tokens"),
        ({"truncation_side": "middle"}, "truncation_side"),
        ({"add_special_tokens": 1}, "add_special_tokens"),
        ({"padding": True}, "tokenization_kwargs"),
        ([1], "tokenization_kwargs"),
    ],
)
def test_wrong_options_of_tokenization_are_named(llm: LLM, options: Any, param: str) -> None:
    with pytest.raises(InvalidRequest, match=param) as caught:
        greedy(llm, "x", tokenization_kwargs=options)
    assert caught.value.param == param


def test_without_detokenize_there_are_tokens_only(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    params = SamplingParams(temperature=0, max_tokens=8, logprobs=2, prompt_logprobs=1)
    (whole,) = llm.generate(PROMPTS[0], params, use_tqdm=False)
    params.detokenize = False
    monkeypatch.setattr("shared.text.detokenizer.Detokenizer.push", lambda *_: pytest.fail("text was made"))
    (bare,) = llm.generate([whole.prompt_token_ids], params, use_tqdm=False)
    one, other = whole.outputs[0], bare.outputs[0]
    assert (other.text, other.token_ids, other.finish_reason) == ("", one.token_ids, one.finish_reason)
    assert one.logprobs
    assert other.logprobs
    for described, plain in zip(
        [*one.logprobs, *(whole.prompt_logprobs or [])[1:]],
        [*other.logprobs, *(bare.prompt_logprobs or [])[1:]],
        strict=True,
    ):
        assert described
        assert plain
        assert {id: (item.logprob, item.rank) for id, item in described.items()} == {
            id: (item.logprob, item.rank) for id, item in plain.items()
        }
        assert all(item.decoded_token is not None for item in described.values())
        assert all(item.decoded_token is None for item in plain.values())


def test_flat_logprobs_read_as_the_list_does(llm: LLM) -> None:
    params = SamplingParams(temperature=0, max_tokens=6, logprobs=3, prompt_logprobs=2)
    (nested,) = llm.generate(PROMPTS[0], params, use_tqdm=False)
    params.flat_logprobs = True
    (flat,) = llm.generate(PROMPTS[0], params, use_tqdm=False)
    logprobs, expected = flat.outputs[0].logprobs, nested.outputs[0].logprobs
    assert expected is not None
    assert isinstance(logprobs, FlatLogprobs)
    assert list(logprobs) == expected
    assert logprobs[-1] == expected[-1]
    assert list(logprobs[1:3]) == expected[1:3]
    assert logprobs.token_ids == [id for position in expected for id in position]
    assert isinstance(flat.prompt_logprobs, FlatLogprobs)
    assert list(flat.prompt_logprobs) == [position or {} for position in nested.prompt_logprobs or []]
    with pytest.raises(IndexError):
        logprobs[len(expected)]


@pytest.mark.parametrize("kind", RequestOutputKind)
def test_outputs_are_whole_whatever_a_stream_would_have(llm: LLM, kind: RequestOutputKind) -> None:
    params = SamplingParams(temperature=0, max_tokens=8, output_kind=kind, stream_interval=4)
    assert texts(llm.generate(PROMPTS, params, use_tqdm=False)) == texts(greedy(llm, PROMPTS))


def test_a_chat_with_tools_shows_them(llm: LLM) -> None:
    messages: list[dict[str, Any]] = [{"role": "user", "content": "How warm is Paris?"}]
    (output,) = llm.chat(messages, GREEDY, use_tqdm=False, tools=[TOOL], chat_template=TOOL_TEMPLATE)
    assert output.prompt == 'get_weather: ["city"]\n[user] How warm is Paris?\n> '
    call = {"id": "a", "type": "function", "function": {"name": "get_weather", "arguments": '{"city": "Oslo"}'}}
    messages += [
        {"role": "assistant", "content": None, "tool_calls": [call]},
        {"role": "tool", "content": "20", "tool_call_id": "a"},
    ]
    llm.enqueue_chat(messages, GREEDY, tools=[TOOL], chat_template=TOOL_TEMPLATE)
    (answer,) = llm.wait_for_completion(use_tqdm=False)
    assert answer.prompt == f"{(output.prompt or '')[:-2]}[assistant] Oslo\n[tool] 20\n> "
    with pytest.raises(InvalidRequest, match="tools: the chat template does not show them"):
        llm.chat(HELLO, GREEDY, tools=[TOOL])
    with pytest.raises(InvalidRequest) as caught:
        llm.chat(HELLO, GREEDY, tools=[{"type": "function"}], chat_template=TOOL_TEMPLATE)
    assert caught.value.param == "tools[0].function"


def test_options_of_a_chat_reach_the_template(llm: LLM) -> None:
    def prompt(**options: Any) -> str | None:
        return llm.chat(HELLO, GREEDY, use_tqdm=False, **options)[0].prompt

    assert prompt() == "[user] Hello!\n> "
    assert prompt(add_generation_prompt=False) == "[user] Hello!\n"
    assert prompt(add_generation_prompt=False, continue_final_message=True) == "[user] Hello!"
    moody = "{{ mood }}: {{ messages[0].content }}"
    assert prompt(chat_template=moody, chat_template_kwargs={"mood": "sad"}) == "sad: Hello!"
    parts = "{{ messages[0].content | tojson }}"
    assert prompt(chat_template=parts, chat_template_content_format="string") == '"Hello!"'
    assert prompt(chat_template=parts, chat_template_content_format="openai") == '[{"type": "text", "text": "Hello!"}]'
    for name, value in (
        ("chat_template", "{% for %}"),
        ("chat_template_content_format", "xml"),
        ("continue_final_message", True),
        ("chat_template_kwargs", {"messages": []}),
    ):
        with pytest.raises(InvalidRequest, match=name) as caught:
            prompt(**{name: value})
        assert caught.value.param == name


@pytest.mark.parametrize("literal", [True, False])
def test_the_template_can_be_set_for_all_chats(folder: Path, tmp_path: Path, literal: bool) -> None:
    source = "{{ mood }}:{{ messages[0].content }}"
    file = tmp_path / "mine.jinja"
    file.write_text(source)
    settings: dict[str, Any] = {"kv_cache_memory": 0.05, "num_threads": 1}
    template = source if literal else file
    with LLM(folder, chat_template=template, default_chat_template_kwargs={"mood": "glad"}, **settings) as own:
        assert own.chat(HELLO, GREEDY, use_tqdm=False)[0].prompt == "glad:Hello!"
        assert own.chat(HELLO, GREEDY, use_tqdm=False, chat_template="{{ mood }}!")[0].prompt == "glad!"
        assert own.get_tokenizer().chat_template == source


def test_defaults_can_be_overridden_for_all_calls(folder: Path) -> None:
    settings: dict[str, Any] = {"kv_cache_memory": 0.05, "num_threads": 1}
    override = {"temperature": 0.25, "max_new_tokens": 3}
    with LLM(folder, override_generation_config=override, generation_config="vllm", max_logprobs=1, **settings) as own:
        params = own.get_default_sampling_params()
        assert params == SamplingParams(temperature=0.25, max_tokens=3)
        params.max_tokens = 2  # as vLLM's examples do
        params.ignore_eos = True
        assert len(own.generate("x", params, use_tqdm=False)[0].outputs[0].token_ids) == 2
        with pytest.raises(InvalidRequest, match="logprobs must be at most max_logprobs, 1, got 2"):
            own.generate("x", SamplingParams(logprobs=2))


def test_the_tokenizer_is_one_of_transformers(llm: LLM) -> None:
    tokenizer = llm.get_tokenizer()
    assert tokenizer is llm.get_tokenizer()
    for text in (*PROMPTS, "</s>é \U0001f600", ""):
        ids = llm.tokenizer.encode(text)
        assert tokenizer.encode(text) == tokenizer(text)["input_ids"] == ids
        assert tokenizer.decode(ids) == llm.tokenizer.decode(ids, skip_special_tokens=False)
    assert tokenizer.eos_token_id == llm.tokenizer.eos_token_ids[0]
    assert len(tokenizer) == llm.tokenizer.vocab_size
    prompt = tokenizer.apply_chat_template(HELLO, tokenize=False, add_generation_prompt=True)
    assert prompt == "[user] Hello!\n> " == llm.chat(HELLO, GREEDY, use_tqdm=False)[0].prompt
    tokenizer.add_tokens(["<new>"])
    assert llm.tokenizer.token_id("<new>") is None, "the user's tokenizer is a copy"


def test_metrics_are_those_of_a_server(folder: Path) -> None:
    prompt = " ".join(PROMPTS * 2)
    with LLM(folder, kv_cache_memory=0.05, num_threads=1, served_model_name="tiny") as own:
        outputs = [greedy(own, prompt)[0] for _ in range(2)]
        metrics = {metric.name: metric for metric in own.get_metrics()}
    generated, cached = metrics["vllm:generation_tokens"], metrics["vllm:prefix_cache_hits"]
    assert isinstance(generated, Counter)
    assert isinstance(cached, Counter)
    assert generated.value == sum(len(output.outputs[0].token_ids) for output in outputs)
    assert cached.value == outputs[1].num_cached_tokens > 0
    assert generated.labels == {"model_name": "tiny", "engine": "0"}
    running, sizes = metrics["vllm:num_requests_running"], metrics["vllm:iteration_tokens_total"]
    assert isinstance(running, Gauge)
    assert isinstance(sizes, Histogram)
    assert running.value == 0
    assert sizes.buckets["+Inf"] == sizes.count > 0
    assert sizes.sum >= len(outputs[0].prompt_token_ids)


@pytest.mark.parametrize("name", METHODS)
def test_a_method_that_is_missing_says_why(llm: LLM, name: str) -> None:
    """So that a program that looks for it, and one that calls it, both learn the truth."""
    assert not hasattr(llm, name)
    with pytest.raises(AttributeError, match=f"LLM.{name} is not supported: "):
        getattr(llm, name)()


def test_no_method_is_both_there_and_refused() -> None:
    assert not METHODS.keys() & {name for name, _ in inspect.getmembers(LLM)}
    with pytest.raises(AttributeError, match="LLM has no frobnicate"):
        LLM.__new__(LLM).frobnicate()
