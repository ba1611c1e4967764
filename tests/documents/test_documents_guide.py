"""Runs the examples of a guide to vLLM ("Introduction to vLLM"), from its beginning to its end, with Quire.

Names, arguments and calls are the guide's. Changed are the import (`vllm` is `quire`), the model, and the URL.

What cannot run as it is written there, with vLLM or with Quire:

- `NaiveKVCache`, `PagedKVCache` and `ContinuousBatcher` are sketches of an engine, and use names that they do not
  define (`allocations`, `num_physical_blocks`, `OutOfMemoryError`, `run_model`). What they show of an engine is tested.
- The loop over log-probabilities prints `token` and `logprob`, which nothing sets: a NameError. The least that makes it
  run is `for token, logprob in output.items():` in it. (vLLM refuses `top_logprobs` before that; Quire takes it.)
- `set_adapters`, and an adapter's name as `lora_request`, are not in vLLM 0.32. Quire has both.
- `quantization="squeezellm"`, in a comment, was removed from vLLM, and is refused here.
- vLLM's image does not read the variables MODEL_NAME and TP_SIZE of the Deployment. Quire has manifests of its own, one
  container for each service, in which MODEL_NAME is an entry of a ConfigMap.
"""

from pathlib import Path
from statistics import fmean
from typing import Any

import openai
import pytest
import requests

from quire import LLM, RequestOutput, SamplingParams, StructuredOutputsParams
from quire.outputs import RequestStateStats
from shared.errors import ConfigError, InvalidRequest
from tests.deploy.test_deploy_kubernetes import BASE, ROOT, config, container, resource


def figures(llm: LLM) -> dict[str, float]:
    """Return the values of an engine's metrics that have one."""
    return {metric.name: metric.value for metric in llm.get_metrics() if hasattr(metric, "value")}


def times(output: RequestOutput) -> RequestStateStats:
    assert output.metrics is not None
    return output.metrics


# Why vLLM matters


def test_memory_is_not_reserved_for_the_longest_output(llama_2_7b: Path) -> None:
    """`NaiveKVCache` reserves a whole context for each request. Here eight run in less memory than two would need."""
    with LLM(model=llama_2_7b, block_size=16, num_gpu_blocks_override=32, max_model_len=256) as llm:
        params = SamplingParams(max_tokens=200, structured_outputs=StructuredOutputsParams(regex="preview" * 3))
        outputs = llm.generate([f"one {number}" for number in range(8)], params)
    began, ended = ([getattr(times(output), name) for output in outputs] for name in ("scheduled_ts", "last_token_ts"))
    assert max(began) < min(ended), "they ran together"


def test_blocks_are_pages_that_come_back(llama_2_7b: Path) -> None:
    """`PagedKVCache`: as many blocks as tokens need; prefixes in common blocks; an error if they can never suffice."""
    with LLM(model=llama_2_7b, block_size=16, num_gpu_blocks_override=8) as llm:
        assert (figures(llm)["quire:kv_blocks"], figures(llm)["quire:kv_blocks_free"]) == (8, 8)
        llm.generate([list(range(5, 45))], SamplingParams(max_tokens=1))
        (output,) = llm.generate([list(range(5, 45))], SamplingParams(max_tokens=1))
        assert output.num_cached_tokens == 32, "its two full blocks"
        assert figures(llm)["quire:kv_blocks_free"] == 8
        with pytest.raises(InvalidRequest, match="128 tokens"):
            llm.generate([list(range(5, 105))], SamplingParams(max_tokens=29))


def test_a_waiting_request_takes_the_place_of_one_that_ends(llama_2_7b: Path) -> None:
    """`ContinuousBatcher`: the batch of two is full, and the third request joins it while the first goes on."""
    lengths = [60, 4, 4]
    with LLM(model=llama_2_7b, max_num_seqs=2, kv_cache_memory=0.05) as llm:
        params = [SamplingParams(max_tokens=length, ignore_eos=True) for length in lengths]
        outputs = llm.generate(["one", "one two", "one two three"], params)
    long, short, waiting = map(times, outputs)
    assert short.last_token_ts <= waiting.scheduled_ts
    assert waiting.last_token_ts < long.last_token_ts


# Using vLLM


def test_basic_usage(llama_2_7b: Path, capsys: pytest.CaptureFixture[str]) -> None:
    llm = LLM(model=llama_2_7b, tensor_parallel_size=1, dtype="half", enforce_eager=True)
    sampling_params = SamplingParams(temperature=0.7, top_p=0.9, max_tokens=512, stop=["User:", "\n###"])
    prompts = [
        "Explain quantum computing in simple terms.",
        "Write a Python function to calculate Fibonacci numbers.",
        "What are the benefits of exercise?",
    ]
    outputs = llm.generate(prompts, sampling_params)
    for output in outputs:
        print(f"Prompt: {output.prompt}")
        print(f"Generated: {output.outputs[0].text}")
        print("---")
    llm.close()
    printed = capsys.readouterr().out
    assert [printed.count(f"Prompt: {prompt}\nGenerated: ") for prompt in prompts] == [1, 1, 1]
    assert all(0 < len(output.outputs[0].token_ids) <= 512 for output in outputs)
    assert not any(stop in output.outputs[0].text for output in outputs for stop in ["User:", "\n###"])


def test_openai_compatible_api(url: str) -> None:
    client = openai.OpenAI(base_url=f"{url}/v1", api_key="dummy")
    response = client.chat.completions.create(
        model="llama-2-7b",
        messages=[
            {"role": "system", "content": "You are a helpful assistant."},
            {"role": "user", "content": "Hello!"},
        ],
        temperature=0.7,
    )
    print(response.choices[0].message.content)
    assert response.choices[0].message.content
    assert (response.model, response.choices[0].message.role) == ("llama-2-7b", "assistant")


def test_multi_lora_serving(llama_2_7b: Path, adapters: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The adapters are folders of these names in the working directory."""
    from peft import PeftModel  # noqa: F401  # the guide imports it, and does not use it

    monkeypatch.chdir(adapters)
    llm = LLM(model=llama_2_7b, enable_lora=True, max_loras=4, max_lora_rank=16)
    llm.set_adapters(["adapter_1", "adapter_2", "adapter_3"])
    outputs = llm.generate(
        ["Hello, I need help with coding."], SamplingParams(temperature=0.7), lora_request="adapter_1"
    )
    assert outputs[0].outputs[0].token_ids
    assert outputs[0].lora_request is not None
    assert outputs[0].lora_request.lora_name == "adapter_1"
    greedy = SamplingParams(temperature=0.0)
    said = [
        tuple(llm.generate("Hello", greedy, lora_request=name)[0].outputs[0].token_ids)
        for name in (None, "adapter_1", "adapter_2", "adapter_3")
    ]
    llm.close()
    assert len(set(said)) == 4, "each changes what is said"


# Performance optimization


def test_tensor_parallelism(llama_2_7b: Path) -> None:
    """Two ranks on the CPU in place of the guide's eight GPUs: the same tokens as one, but for near ties of float32."""
    prompts, greedy = ["Hello, my name is", "The capital of France is"], SamplingParams(temperature=0, max_tokens=8)

    def tokens(**sizes: int) -> list[list[int]]:
        with LLM(model=llama_2_7b, dtype="float32", **sizes) as llm:
            assert llm.get_world_size() == sizes.get("tensor_parallel_size", 1)
            return [list(output.outputs[0].token_ids) for output in llm.generate(prompts, greedy)]

    assert tokens(tensor_parallel_size=2, pipeline_parallel_size=1) == tokens()


def test_quantization(packed: tuple[str, Path]) -> None:
    """Log-probabilities are those of the dequantised weights, but for the 8 bits of activations.

    How those are grouped depends on the processor, so a single one may be 0.3 off, and the mean is compared. The
    weights before they were quantised are 1.3 off in the mean.
    """
    method, folder = packed

    def scores(**settings: Any) -> list[float]:
        with LLM(model=folder, **settings) as llm:
            (output,) = llm.generate("Hello, my name is", SamplingParams(max_tokens=1, prompt_logprobs=0))
        return [next(iter(position.values())).logprob for position in (output.prompt_logprobs or [])[1:]]

    dequantised = scores(dtype="float32", quantization="none", kv_cache_memory=0.05)
    differences = [abs(a - b) for a, b in zip(scores(quantization=method), dequantised, strict=True)]
    assert fmean(differences) < 0.2


def test_squeezellm_needs_such_a_checkpoint(llama_2_7b: Path) -> None:
    """vLLM has dropped this one; tests/models serves packed checkpoints of it."""
    with pytest.raises(ConfigError, match="not a checkpoint whose quantization_config says squeezellm"):
        LLM(model=llama_2_7b, quantization="squeezellm")


def test_prefix_caching(llama_2_7b: Path) -> None:
    """The first request computes the whole prompt, and the next ones take the system prompt's KV from the cache."""
    system = "You are a helpful assistant. Answer briefly, and say so if you do not know. "
    with LLM(model=llama_2_7b, enable_prefix_caching=True) as llm:
        cached = [llm.generate(system + question)[0].num_cached_tokens for question in ("Who?", "Where?", "When?")]
        length = len(llm.tokenizer.encode(system))
    assert cached[0] == 0
    assert cached[1] == cached[2] == length // 16 * 16 > 0


# Monitoring and debugging


def test_logits_processing(llama_2_7b: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The loop has a second one inside, without which its names are not defined."""
    with LLM(model=llama_2_7b) as llm:
        outputs = llm.generate(
            ["Hello, my name is"], SamplingParams(temperature=0.7, logprobs=5, top_logprobs=5, ignore_eos=True)
        )
    logprobs = outputs[0].outputs[0].logprobs
    assert logprobs is not None
    for output in logprobs:
        for token, logprob in output.items():
            print(f"Token: {token}, Logprob: {logprob}")
    assert len(logprobs) == len(outputs[0].outputs[0].token_ids) == 16
    for token, position in zip(outputs[0].outputs[0].token_ids, logprobs, strict=True):
        assert token in position
        assert len(position) in (5, 6), "the five likeliest, and the one that was sampled"
    assert capsys.readouterr().out.count("Token: ") >= 80


def test_performance_metrics(url: str) -> None:
    response = requests.get(f"{url}/metrics")
    print(response.text)
    samples = dict(line.rsplit(" ", 1) for line in response.text.splitlines() if not line.startswith("#"))
    for name in (
        "vllm:request_throughput_tok_per_second",
        "vllm:generation_token_count",
        "vllm:num_requests_waiting",
        "vllm:gpu_cache_usage",
    ):
        (value,) = (value for sample, value in samples.items() if sample.partition("{")[0] == name)
        assert float(value) >= 0


# Production deployment


def test_kubernetes() -> None:
    """The Deployment's parts by their names, in Quire's own manifests."""
    gateways = resource("Deployment", "gateway")
    assert gateways["apiVersion"] == "apps/v1"
    assert resource("HorizontalPodAutoscaler", "gateway")["spec"]["minReplicas"] == 3, "the guide's replicas"
    assert container("gateway")["ports"][0]["containerPort"] == config("gateway").port == 8000
    for name in ("gateway", "scheduler", "worker"):
        assert container(name)["image"] == f"quire-{name}"
    worker = (ROOT / "deploy/kubernetes/overlays/gpu/engine.yaml").read_text()
    assert worker.count("nvidia.com/gpu: 1") == 2, "as request and as limit"
    (kustomization,) = (one for one in BASE if one["kind"] == "Kustomization")
    (model,) = (one for one in kustomization["configMapGenerator"] if one["name"] == "model")
    assert model["literals"] == ["MODEL_NAME=", "TP_SIZE=1"]
    for name in ("gateway", "worker"):
        (variable,) = (entry for entry in container(name)["env"] if entry["name"] == "QUIRE_MODEL")
        assert variable["valueFrom"]["configMapKeyRef"] == {"name": "model", "key": "MODEL_NAME"}
    (size,) = (entry for entry in container("worker")["env"] if entry["name"] == "QUIRE_TENSOR_PARALLEL_SIZE")
    assert size["valueFrom"]["configMapKeyRef"] == {"name": "model", "key": "TP_SIZE"}


def test_the_autoscaler_asks_for_a_figure_of_the_server(url: str) -> None:
    (metric,) = resource("HorizontalPodAutoscaler", "engine")["spec"]["metrics"]
    assert metric["pods"]["metric"]["name"] == "vllm:num_requests_waiting"
    assert "\nvllm:num_requests_waiting{" in requests.get(f"{url}/metrics").text


@pytest.mark.parametrize("check", ["liveness", "readiness"])
def test_health_checks(url: str, check: str) -> None:
    """The guide asks the same path for both."""
    response: Any = requests.get(f"{url}/health")
    assert (response.status_code, response.text) == (200, "")
