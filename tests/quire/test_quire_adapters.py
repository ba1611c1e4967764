"""Tests adapters (LoRA) of `LLM`, made by PEFT, whose own outputs are the measure."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any, cast

import pytest
import torch
from msgspec.structs import replace
from transformers import OPTForCausalLM

from quire import LLM, BeamSearchParams, LoRARequest, SamplingParams
from quire.adapters import Adapters
from services.worker.runner import ModelRunner
from shared.errors import ConfigError, InvalidRequest
from tests.models.peft_adapters import adapted
from tests.quire.adapter_folders import NAMES

GREEDY = SamplingParams(temperature=0.0, max_tokens=8, ignore_eos=True)
PROMPT = "the quick brown fox jumps over the lazy dog and the "


@pytest.fixture(scope="module")
def expected(folder: Path, adapters: Path) -> dict[str, list[int]]:
    """Return PEFT's tokens for the prompt, by the name of the adapter; empty: none."""
    model, tokens = OPTForCausalLM.from_pretrained(folder), {}
    with LLM(folder, **SMALL) as llm:
        prompt = torch.tensor([llm.tokenizer.encode(PROMPT)])
    for name in ("", *NAMES):
        one = adapted(model, adapters / name) if name else model
        generated = one.generate(input_ids=prompt, max_new_tokens=8, min_new_tokens=8, do_sample=False)
        tokens[name] = generated[0, prompt.shape[1] :].tolist()
    assert len(set(map(tuple, tokens.values()))) == 5, "they differ"
    return tokens


SMALL: dict[str, Any] = {"kv_cache_memory": 0.05, "num_threads": 1, "dtype": "float32"}


@pytest.fixture
def llm(folder: Path) -> Iterator[LLM]:
    with LLM(folder, enable_lora=True, max_loras=2, max_lora_rank=16, **SMALL) as one:
        yield one


def tokens(llm: LLM, prompts: Any, **options: Any) -> list[list[int]]:
    outputs = llm.generate(prompts, GREEDY, use_tqdm=False, **options)
    return [list(output.outputs[0].token_ids) for output in outputs]


def test_adapters_have_the_names_of_their_folders(
    folder: Path, adapters: Path, expected: dict[str, list[int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(adapters)
    with LLM(model=folder, enable_lora=True, max_loras=4, max_lora_rank=16, **SMALL) as llm:
        llm.set_adapters(["adapter_1", "adapter_2", "adapter_3"])
        outputs = llm.generate([PROMPT], GREEDY, lora_request="adapter_1")
    assert list(outputs[0].outputs[0].token_ids) == expected["adapter_1"]
    assert outputs[0].lora_request == outputs[0].outputs[0].lora_request == LoRARequest("adapter_1", 1, "adapter_1")


def test_prompts_of_many_adapters_and_of_none_run_together(
    llm: LLM, adapters: Path, expected: dict[str, list[int]]
) -> None:
    """PFX-02: there are more adapters than slots."""
    llm.set_adapters({name: adapters / name for name in NAMES})
    order = ["", "adapter_1", "adapter_2", "adapter_1", "", "adapter_3"]
    chosen = [name or None for name in order]
    for _ in range(2):  # the second time from cached blocks
        assert tokens(llm, [PROMPT] * 6, lora_request=chosen) == [expected[name] for name in order]
    for name in ("", *NAMES):
        assert tokens(llm, PROMPT, lora_request=name or None) == [expected[name]]


def test_a_request_brings_its_adapter(llm: LLM, adapters: Path, expected: dict[str, list[int]]) -> None:
    request = LoRARequest("adapter_2", 7, str(adapters / "adapter_2"))
    assert tokens(llm, PROMPT, lora_request=request) == [expected["adapter_2"]]
    assert tokens(llm, PROMPT, lora_request=request) == tokens(llm, PROMPT, lora_request="adapter_2")
    ids = llm.enqueue([PROMPT], GREEDY, lora_request="adapter_2")
    assert [output.request_id for output in llm.wait_for_completion(use_tqdm=False)] == ids


def test_a_name_has_one_folder(llm: LLM, adapters: Path, expected: dict[str, list[int]]) -> None:
    """PFX-03: another folder under the same name is a conflict, or replaces the first and shares nothing with it."""
    first, second = str(adapters / "adapter_1"), str(adapters / "adapter_2")
    assert tokens(llm, PROMPT, lora_request=LoRARequest("a", 1, first)) == [expected["adapter_1"]]
    for other in (LoRARequest("a", 1, second), LoRARequest("a", 2, first)):
        with pytest.raises(InvalidRequest, match=r"the adapter 'a' is loaded from .* with the id 1") as caught:
            tokens(llm, PROMPT, lora_request=other)
        assert caught.value.param == "lora_request"
    with pytest.raises(InvalidRequest, match="the id 1 is that of the adapter 'a'"):
        tokens(llm, PROMPT, lora_request=LoRARequest("b", 1, second))
    replacing = LoRARequest("a", 1, second, load_inplace=True)
    outputs = llm.generate(PROMPT, GREEDY, use_tqdm=False, lora_request=replacing)
    assert (list(outputs[0].outputs[0].token_ids), outputs[0].num_cached_tokens) == (expected["adapter_2"], 0)


def test_an_adapter_takes_the_place_of_one_that_a_step_in_flight_still_names(
    folder: Path, adapters: Path, expected: dict[str, list[int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """With two steps in flight, as on a GPU, a request that a stop token ends is named by one more."""

    on_cpu = ModelRunner.info
    on_gpu = property(lambda runner: replace(on_cpu.__get__(runner), device="as a GPU"))
    monkeypatch.setattr(ModelRunner, "info", on_gpu)
    first, second = (LoRARequest(name, id, str(adapters / name)) for id, name in enumerate(NAMES[:2], 1))
    stopping = SamplingParams(temperature=0.0, max_tokens=8, stop_token_ids=[expected[first.name][3]])
    with LLM(folder, enable_lora=True, max_lora_rank=16, **SMALL) as llm:
        (output,) = llm.generate(PROMPT, stopping, use_tqdm=False, lora_request=first)
        assert output.outputs[0].finish_reason == "stop"
        assert tokens(llm, PROMPT, lora_request=second) == [expected[second.name]]


def test_setting_adapters_forgets_the_others(llm: LLM, adapters: Path, expected: dict[str, list[int]]) -> None:
    llm.set_adapters([adapters / "adapter_1", LoRARequest("second", 1, str(adapters / "adapter_2"))])
    assert tokens(llm, PROMPT, lora_request="second") == [expected["adapter_2"]]
    llm.set_adapters({"second": adapters / "adapter_3"})
    assert tokens(llm, PROMPT, lora_request="second") == [expected["adapter_3"]]
    with pytest.raises(InvalidRequest, match="there is no adapter 'adapter_1'; there is: second"):
        tokens(llm, PROMPT, lora_request="adapter_1")
    llm.set_adapters([])
    with pytest.raises(InvalidRequest, match="there is: none"):
        tokens(llm, PROMPT, lora_request="second")


def test_chats_and_beams_take_adapters(llm: LLM, adapters: Path) -> None:
    llm.set_adapters([adapters / name for name in NAMES])
    messages = [{"role": "user", "content": "hello"}]
    chats = [llm.chat(messages, GREEDY, use_tqdm=False, lora_request=name)[0] for name in (None, "adapter_1")]
    assert chats[0].outputs[0].token_ids != chats[1].outputs[0].token_ids
    params = BeamSearchParams(beam_width=2, max_tokens=4)
    plain, adapted_one = (
        llm.beam_search([PROMPT], params, lora_request=name)[0].sequences[0].tokens for name in (None, "adapter_1")
    )
    assert plain != adapted_one


def test_an_adapter_that_does_not_fit_is_refused_and_the_others_stay(
    llm: LLM, adapters: Path, expected: dict[str, list[int]]
) -> None:
    llm.set_adapters([adapters / "adapter_1"])
    for wrong, words in ((adapters / "broken", "use_dora"), (adapters / "missing", "missing")):
        with pytest.raises(InvalidRequest, match=f"the adapter '{wrong.name}' cannot be loaded: .*{words}"):
            llm.set_adapters([wrong])
    assert tokens(llm, PROMPT, lora_request="adapter_1") == [expected["adapter_1"]]


def test_an_interrupted_call_leaves_the_adapters(
    llm: LLM, adapters: Path, expected: dict[str, list[int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The engine begins anew, and loads them again."""
    llm.set_adapters([adapters / "adapter_1"])
    with monkeypatch.context() as patch:
        patch.setattr("quire.pending_request.PendingRequest.apply", lambda *_: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            tokens(llm, PROMPT, lora_request="adapter_1")
    assert tokens(llm, PROMPT, lora_request="adapter_1") == [expected["adapter_1"]]


@pytest.mark.parametrize("value", [5, object(), {"a": 1}, ["adapter_1"] * 2, [5]])
def test_other_values_name_the_argument(llm: LLM, value: Any) -> None:
    with pytest.raises(InvalidRequest) as caught:
        tokens(llm, PROMPT, lora_request=value)
    assert caught.value.param == "lora_request"


@pytest.mark.parametrize("value", ["adapter_1", 5, [5], {"a": 5}, ["/x/a", "/y/a"], {1: "/a"}])
def test_other_sets_of_adapters_name_the_argument(llm: LLM, value: Any) -> None:
    with pytest.raises(InvalidRequest) as caught:
        llm.set_adapters(value)
    assert caught.value.param == "adapters"


@pytest.mark.parametrize("fields", [("", 1, "/a"), ("a", 0, "/a"), ("a", 1, ""), (5, 1, "/a"), ("a", "1", "/a")])
def test_a_lora_request_is_checked(fields: Any) -> None:
    with pytest.raises(InvalidRequest):
        LoRARequest(*fields)


def test_adapters_need_enable_lora(folder: Path, adapters: Path) -> None:
    with LLM(folder, **SMALL) as llm:
        with pytest.raises(InvalidRequest, match=r"cannot be loaded: .*enable.lora"):
            llm.set_adapters([adapters / "adapter_1"])
        assert tokens(llm, PROMPT, lora_request=None)
        assert tokens(llm, PROMPT, lora_request={})
    with pytest.raises(ConfigError, match="max-cpu-loras"):
        LLM(folder, enable_lora=True, max_loras=4, max_cpu_loras=2, **SMALL)


def test_an_adapter_of_many_prompts_is_loaded_once() -> None:
    loads: list[str] = []

    class Engine:
        """Notes what it is to load."""

        def add_adapter(self, name: str, path: str, *, replaces: bool) -> str:
            loads.append(name)
            return ""

    adapters = Adapters(cast(Any, Engine()))
    a, b = (LoRARequest(name, id, "/" + name, load_inplace=True) for id, name in ((1, "a"), (2, "b")))
    assert adapters.for_prompts([a, None, b, a, a], 5) == [a, None, b, a, a]
    assert loads == ["a", "b"]
