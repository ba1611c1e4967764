"""Runs scripts as vLLM's users write them, each in a process of its own, with only the import line changed.

They have no `if __name__ == "__main__"`, and leave the model to the end of the process.
"""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

IMPORTS = """\
import json, sys
from quire import (LLM, CompletionOutput, Counter, RequestOutput, RequestOutputKind, SamplingParams,
                   StructuredOutputsParams, TokensPrompt)

llm = LLM(model=sys.argv[1], tensor_parallel_size=1, dtype="float32", enforce_eager=True, trust_remote_code=True,
          gpu_memory_utilization=0.9, max_model_len=128, swap_space=0, disable_log_stats=True, seed=0,
          kv_cache_memory_bytes=50_000_000)
"""

SCRIPTS = {
    "basic": """
prompts = ["Hello, my name is", "The president of the United States is", "The capital of France is", "The future is"]
sampling_params = SamplingParams(temperature=0.8, top_p=0.95)
outputs = llm.generate(prompts, sampling_params)
result = [(output.prompt, output.outputs[0].text, len(output.outputs[0].token_ids)) for output in outputs]
assert [prompt for prompt, _, _ in result] == prompts
assert all(0 < count <= 16 for _, _, count in result)
""",
    "batch": """
prompts = [f"Question {i}:" for i in range(100)]
params = [SamplingParams(temperature=1.0, seed=i, max_tokens=4, ignore_eos=True) for i in range(100)]
outputs = llm.generate(prompts, params, use_tqdm=False)
result = [output.outputs[0].token_ids for output in outputs]
assert [output.request_id for output in outputs] == sorted((o.request_id for o in outputs), key=int)
assert all(len(ids) == 4 for ids in result) and len({tuple(ids) for ids in result}) > 50
""",
    "chat": """
sampling_params = llm.get_default_sampling_params()
sampling_params.max_tokens = 6
sampling_params.temperature = 0
conversation = [{"role": "system", "content": "You are a helpful assistant"}, {"role": "user", "content": "Hello"},
                {"role": "assistant", "content": "Hello! How can I assist you today?"},
                {"role": "user", "content": "Write an essay."}]
outputs = llm.chat(conversation, sampling_params, use_tqdm=False)
outputs += llm.chat([conversation] * 3, sampling_params, use_tqdm=False)
result = [output.outputs[0].text for output in outputs]
assert len(result) == 4 and len(set(result)) == 1
tokenizer = llm.get_tokenizer()
prompt = tokenizer.apply_chat_template(conversation, tokenize=False, add_generation_prompt=True)
assert llm.generate(prompt, sampling_params, use_tqdm=False)[0].outputs[0].text == result[0]
""",
    "structured": """
def ask(params):
    sampling = SamplingParams(structured_outputs=params, max_tokens=60, temperature=0.7)
    return llm.generate("Classify this: wonderful!", sampling_params=sampling, use_tqdm=False)[0].outputs[0].text
choice = ask(StructuredOutputsParams(choice=["Positive", "Negative"]))
schema = {"type": "object", "properties": {"a": {"type": "integer", "maximum": 99, "minimum": 0}}, "required": ["a"],
          "additionalProperties": False}
result = [choice, json.loads(ask(StructuredOutputsParams(json=schema, disable_any_whitespace=True))),
          ask(StructuredOutputsParams(regex="[a-c]{3}@[a-c]{2}"))]
assert choice in ("Positive", "Negative") and 0 <= result[1]["a"] <= 99 and len(result[2]) == 6
""",
    "logprobs": """
params = SamplingParams(temperature=0.0, max_tokens=5, logprobs=3, prompt_logprobs=0)
(output,) = llm.generate(["The capital of France is"], params, use_tqdm=False)
completion = output.outputs[0]
result = []
for token_id, position in zip(completion.token_ids, completion.logprobs):
    best = max(position.values(), key=lambda logprob: logprob.logprob)
    assert position[token_id].rank == best.rank == 1
    result.append((best.decoded_token, best.logprob))
assert abs(completion.cumulative_logprob - sum(logprob for _, logprob in result)) < 1e-4
assert output.prompt_logprobs[0] is None
total = sum(position[id].logprob for id, position in zip(output.prompt_token_ids[1:], output.prompt_logprobs[1:]))
assert total < 0
""",
    "enqueued": """
def count_tokens():
    return [m.value for m in llm.get_metrics() if isinstance(m, Counter) and m.name == "vllm:generation_tokens"][0]
before = count_tokens()
params = SamplingParams(n=2, temperature=1.0, seed=7, max_tokens=5, detokenize=False,
                        output_kind=RequestOutputKind.FINAL_ONLY)
ids = llm.enqueue([TokensPrompt(prompt_token_ids=[5, 6, 7 + i]) for i in range(10)], params)
outputs = llm.wait_for_completion()
assert [output.request_id for output in outputs] == ids
assert all(isinstance(output, RequestOutput) and output.finished and len(output.outputs) == 2 for output in outputs)
assert all(isinstance(one, CompletionOutput) and one.text == "" for output in outputs for one in output.outputs)
result = [one.token_ids for output in outputs for one in output.outputs]
assert count_tokens() - before == sum(map(len, result))
""",
}


@pytest.fixture(scope="module")
def run_all(folder: Path) -> dict[str, Any]:
    """Return the results of all scripts, run one after the other as one script in one process."""
    parts = [f"{text}\nprint('RESULT', json.dumps([{name!r}, result]))\n" for name, text in SCRIPTS.items()]
    script = IMPORTS + "".join(parts) + "print('END')\n"
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path), "QUIRE_NUM_THREADS": "1"}
    process = subprocess.run(
        [sys.executable, "-c", script, str(folder)], capture_output=True, text=True, env=environment, timeout=120
    )
    assert process.returncode == 0, process.stderr
    lines = process.stdout.splitlines()
    assert lines[-1] == "END"
    results = dict(json.loads(line.removeprefix("RESULT ")) for line in lines if line.startswith("RESULT "))
    return {"stderr": process.stderr, **results}


@pytest.mark.parametrize("name", SCRIPTS)
def test_a_script_for_vllm_runs(run_all: dict[str, Any], name: str) -> None:
    assert run_all[name]


def test_a_script_ends_without_a_word(run_all: dict[str, Any]) -> None:
    """Only bars are there, of loading and of the calls that did not turn them off: no warning, no leak at the end."""
    lines = [line for line in run_all["stderr"].replace("\r", "\n").splitlines() if line.strip()]
    assert [line for line in lines if not line.startswith(("loading weights", "Processed prompts"))] == []
