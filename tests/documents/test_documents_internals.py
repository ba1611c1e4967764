"""Runs the examples of an article about vLLM's internals, from its beginning to its end, with Quire.

Names, arguments and calls are the article's. Changed are the import (`vllm` is `quire`), the model, the URL, and of the
start line the command: `python -m vllm.entrypoints.openai.api_server` is `quire serve`. All of it can run as written.
"""

from pathlib import Path

import pytest
import requests
from openai import OpenAI

from quire import LLM, SamplingParams
from quire.settings import Settings
from tests.documents.test_documents_guide import figures, times
from tests.quire.test_quire_vllm import parse


def tokens(llm: LLM, prompts: list[str], params: SamplingParams) -> list[list[int]]:
    return [list(sample.token_ids) for output in llm.generate(prompts, params) for sample in output.outputs]


# Detailed operating principles and structure


def test_a_block_has_16_tokens(url: str) -> None:
    (line,) = (one for one in requests.get(f"{url}/metrics").text.splitlines() if one.startswith("vllm:cache_config"))
    assert 'block_size="16"' in line


def test_samples_share_the_blocks_of_their_prompt(llama_2_7b: Path) -> None:
    """Copy on write: a prompt of 4 full blocks and one token, and 6 samples of a few tokens, fit into 10 blocks."""
    prompt = [list(range(5, 5 + 4 * 16 + 1))]
    with LLM(model=llama_2_7b, num_gpu_blocks_override=10, enable_prefix_caching=False) as llm:
        (output,) = llm.generate(prompt, SamplingParams(n=6, max_tokens=8, ignore_eos=True, seed=1))
        assert figures(llm)["vllm:num_preemptions"] == 0
    assert len({tuple(sample.token_ids) for sample in output.outputs}) == 6, "each wrote its own"


@pytest.mark.parametrize("mode", ["swap", "recompute"])
def test_a_lack_of_blocks_swaps_requests_out_and_in(llama_2_7b: Path, mode: str) -> None:
    """Preemption: four sequences need 4 blocks each in the end, and there are 10. What they write stays the same."""
    prompts = ["one two", "three four", "five six", "hello"]
    params = SamplingParams(temperature=0, max_tokens=50, ignore_eos=True)
    settings = {"swap_space": 0.01, "preemption_mode": mode, "dtype": "float32"}
    with LLM(model=llama_2_7b, num_gpu_blocks_override=10, **settings) as llm:
        crowded, found = tokens(llm, prompts, params), figures(llm)
    with LLM(model=llama_2_7b, kv_cache_memory=0.05, **settings) as llm:
        assert crowded == tokens(llm, prompts, params)
    assert found["vllm:num_preemptions"] > 0
    assert (found["quire:swapped_preemptions"] > 0) == (mode == "swap")


# Example


def test_run_vllm_offline(opt_125m: Path, capsys: pytest.CaptureFixture[str]) -> None:
    prompts = [
        "What is the capital of France?",
        "Explain the theory of relativity in simple terms.",
        "Write a short python code to reverse a string.",
    ]
    sampling_params = SamplingParams(temperature=0.8, top_p=0.95, max_tokens=100)
    print("Loading LLM Engine...")
    llm = LLM(model=opt_125m)
    outputs = llm.generate(prompts, sampling_params)
    for output in outputs:
        prompt = output.prompt
        generated_text = output.outputs[0].text
        print(f"Prompt: {prompt!r}\nGenerated: {generated_text!r}\n")
    llm.close()
    printed = capsys.readouterr().out
    assert [printed.count(f"Prompt: {prompt!r}\nGenerated: ") for prompt in prompts] == [1, 1, 1]
    assert all(0 < len(output.outputs[0].token_ids) <= 100 for output in outputs)


# Server execution and client communication


def test_the_start_line() -> None:
    """The server of the next test has these flags. Its model comes in front of them, and its port is a free one."""
    line = "--model meta-llama/Llama-2-7b-chat-hf --host 0.0.0.0 --port 8000"
    line += " --gpu-memory-utilization 0.90 --max-model-len 4096"
    settings, notes = parse(line)
    assert isinstance(settings, Settings)
    assert settings.worker.model == settings.gateway.model == "meta-llama/Llama-2-7b-chat-hf"
    assert (settings.gateway.host, settings.gateway.port) == ("0.0.0.0", 8000)
    assert settings.worker.gpu_memory_utilization == 0.9
    assert settings.scheduler.max_model_len == 4096
    assert notes == []


def test_call_vllm_api_server(url: str) -> None:
    client = OpenAI(base_url=f"{url}/v1", api_key="EMPTY")
    completion = client.chat.completions.create(
        model="meta-llama/Llama-2-7b-chat-hf",
        messages=[
            {"role": "system", "content": "You are a highly skilled software engineer."},
            {"role": "user", "content": "Can you explain how PagedAttention works?"},
        ],
        max_tokens=200,
        temperature=0.7,
    )
    print("vLLM Response:")
    print(completion.choices[0].message.content)
    assert completion.choices[0].message.content
    assert completion.usage is not None
    assert completion.usage.completion_tokens <= 200


# Sequential processing and continuous batching


def test_short_requests_leave_and_new_ones_join_while_a_long_one_runs(llama_2_7b: Path) -> None:
    """A wants 100 tokens, B, C and D 10. At their last token they leave the batch of four, and E begins."""
    lengths = {"A": 100, "B": 10, "C": 10, "D": 10, "E": 10}
    with LLM(model=llama_2_7b, max_num_seqs=4, kv_cache_memory=0.05) as llm:
        params = [SamplingParams(max_tokens=length, ignore_eos=True) for length in lengths.values()]
        outputs = llm.generate(list(lengths), params)
    a, b, c, d, e = map(times, outputs)
    assert max(one.first_token_ts for one in (a, b, c, d)) < b.last_token_ts, "they ran together"
    assert b.last_token_ts <= e.scheduled_ts < e.last_token_ts < a.last_token_ts
