"""Tests that vLLM's start lines, configuration files and arguments work, or are refused by name with a reason."""

import json
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from quire import settings, vllm, vllm_settings
from quire.arguments import translate_arguments
from shared.config import flag_parser
from shared.errors import ConfigError


def parse(line: str) -> tuple[settings.Settings, list[str]]:
    """Return the settings of a start line, and the messages about it."""
    parser = flag_parser([settings.public_config()], prog="quire serve")
    parser.add_argument("positional", nargs="?")
    vllm.add_flags(parser)
    flags = vars(parser.parse_args(vllm.spell_out(line.split())))
    flags.pop("positional", None)
    notes: list[str] = []
    return settings.read(flags, {}, notes.append), notes


@pytest.mark.parametrize(
    "line",
    [
        "--performance-mode balanced",
        "--seed 0",
        "--enable-chunked-prefill",
        "--disable-log-requests",
        "--uvicorn-log-level info",
        "--trust-remote-code",
        "--max-logprobs 20",
        '--allowed-origins ["*"] --allowed-methods ["GET","POST"] --allowed-headers ["*"] --allow-credentials',
        "--uds /tmp/x.sock",
        "--tensor-parallel-size 1 -pp 1 --swap-space 4 --max-model-len 32k",
        "m --dtype auto --gpu-memory-utilization 0.9 --max-num-seqs 256 --disable-log-stats --no-enable-prefix-caching",
        '--compilation-config {"mode":3} -O3 --compilation-config.cudagraph_mode none -cc.mode=3',
        "--attention-backend FLASH_ATTN --distributed-executor-backend mp --enable-prefix-caching",
        '--limit-mm-per-prompt {"image":0} --no-enable-log-requests --tokenizer-mode auto --load-format auto',
        "--max_model_len 2048 --served_model_name a b --cuda-graph-sizes 1 2 4 --api-key x",
        "--quantization gptq_marlin --kv-cache-memory-bytes 2G --generation-config vllm --stream-interval 4",
        "--cpu-offload-gb 0.0 --ssl-cert-reqs 0",
        "-dp 2 -asc 4 --data-parallel-backend mp",
    ],
)
def test_start_lines_of_vllm_are_taken(line: str) -> None:
    """API-02: Quire used to refuse nearly every start line of a vLLM user."""
    parse(line)


def test_what_is_renamed_has_its_effect() -> None:
    """API-02: a flag that means something here is honoured, in vLLM's spelling."""
    result, notes = parse(
        "--uvicorn-log-level warning --shutdown-timeout 7 --kv-cache-memory-bytes 1.5G --max-model-len 2K "
        "-q gptq_marlin"
    )
    assert notes == []
    assert (result.gateway.log_level, result.scheduler.log_level, result.worker.log_level) == ("warning",) * 3
    assert result.gateway.drain_timeout == result.scheduler.drain_timeout == 7
    assert result.worker.kv_cache_memory == 1.5
    assert (result.scheduler.max_model_len, result.worker.quantization) == (2048, "gptq")
    assert parse("--max-model-len auto")[0].scheduler.max_model_len is None
    assert parse("--max-model-len=-1")[0].scheduler.max_model_len is None
    assert parse("--max-model-len -1")[0].scheduler.max_model_len is None
    assert parse("--max-model-len 1.5k")[0].scheduler.max_model_len == 1500
    assert parse("--max-logprobs 5")[0].gateway.max_logprobs == 5
    assert parse("-dp 2 --api_server_count=3")[0].serve == settings.ServeConfig(
        data_parallel_size=2, api_server_count=3
    )
    worker = parse("-tp 2 --pipeline_parallel_size=3")[0].worker
    assert (worker.tensor_parallel_size, worker.pipeline_parallel_size) == (2, 3)
    assert parse("--enforce-eager")[0].worker.enforce_eager
    assert parse("--swap-space 8")[0].worker.swap_space == parse("--kv-offloading-size 8")[0].worker.swap_space == 8
    assert parse("--preemption-mode swap")[0].scheduler.preemption_mode == "swap"
    assert parse("--kv-cache-dtype fp8_per_token_head")[0].worker.kv_cache_dtype == "fp8"


def test_what_is_taken_without_effect_is_said_once_each() -> None:
    result, notes = parse("--seed 0 --performance-mode balanced -n 1 --max-paddings 4")
    assert result == parse("")[0]
    assert [note.partition(" is accepted without effect: ")[0] for note in notes] == [
        "--seed 0",
        "--performance-mode balanced",
        "--nnodes 1",
        "--max-paddings 4",
    ]


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("-n 2", "--nnodes 2 is not supported: `quire serve` starts the ranks of this machine"),
        ("-dcp 2", "--decode-context-parallel-size 2 is not supported: a sequence's context is not divided"),
        ("--default-mm-loras {}x", "--default-mm-loras {}x is not supported: only text is served"),
        ("--no-enable-chunked-prefill", "--enable-chunked-prefill=false is not supported: prompts are always computed"),
        (
            "--tool-parser-plugin f.py",
            "--tool-parser-plugin f.py is not supported: parsers of tool calls and reasoning",
        ),
        ("--speculative-config {}", "--speculative-config {} is not supported: there is no speculative decoding"),
        ("--tokenizer-mode mistral", "--tokenizer-mode mistral is not supported: "),
        ("--middleware a.b c.d", "--middleware ['a.b', 'c.d'] is not supported: "),
        ("--max-model-len 1.0001k", "--max-model-len 1.0001k: must be a whole number"),
        ("--cpu-offload-gb 0.5", "--cpu-offload-gb 0.5 is not supported: weights stay on the device"),
        ("--kv-cache-memory-bytes many", "--kv-cache-memory-bytes many: must be a number of bytes"),
        ("--max-model-len many", "--max-model-len 'many': Expected `int"),
        ("--no-such-flag-of-vllm", "unrecognized arguments: --no-such-flag-of-vllm"),
    ],
)
def test_what_cannot_be_honoured_is_refused_with_its_reason(line: str, message: str) -> None:
    with pytest.raises(ConfigError) as caught:
        parse(line)
    assert str(caught.value).startswith(message)


def test_files_go_through_the_same_tables(tmp_path: Path) -> None:
    """API-02, API-03: a file of vLLM's, with strings where Quire has lists."""
    file = tmp_path / "vllm.yaml"
    file.write_text(
        "served-model-name: foo\napi-key: 123\nnnodes: 1\nenforce-eager: true\n"
        "max-model-len: 2k\nkv_cache_memory_bytes: 1073741824\nrevision: null\n"
    )
    notes: list[str] = []
    result = settings.read({"config": str(file)}, {}, notes.append)
    assert result.gateway.served_model_name == ["foo"]
    assert result.gateway.api_key == ["123"]
    assert (result.scheduler.max_model_len, result.worker.kv_cache_memory) == (2000, 1.0)
    assert result.worker.enforce_eager
    assert [note.partition(" is accepted")[0] for note in notes] == [
        f"--config {file}: --nnodes 1",
    ]
    file.write_text("kv_cache_memory_bytes: null\n")
    assert settings.read({"config": str(file)}, {}).worker.kv_cache_memory is None
    file.write_text("headless: true\n")
    with pytest.raises(ConfigError, match=r"vllm\.yaml: --headless is not supported: a scheduler"):
        settings.read({"config": str(file)}, {})


def test_the_key_of_vllm_protects_the_server() -> None:
    """API-02: who sets VLLM_API_KEY must not get a server that is open."""
    assert settings.read({}, {"VLLM_API_KEY": "a,b"}).gateway.api_key == ["a,b"]
    assert settings.read({}, {"VLLM_API_KEY": "a", "QUIRE_API_KEY": "b"}).gateway.api_key == ["b"]
    assert settings.read({}, {"VLLM_API_KEY": "a\n", "QUIRE_API_KEY": " "}).gateway.api_key == ["a"]  # blank: unset
    assert settings.read({}, {"VLLM_API_KEY": " "}).gateway.api_key == []
    result = settings.read({"api_key": ["c"]}, {"VLLM_API_KEY": "a"})
    assert result.gateway.api_key == ["c"]
    assert json.loads(settings.service_environment(result)["QUIRE_API_KEY"]) == ["c"]


def test_the_variable_of_vllm_makes_the_server_batch_invariant() -> None:
    assert not settings.read({}, {"VLLM_BATCH_INVARIANT": "0"}).worker.batch_invariant
    result = settings.read({}, {"VLLM_BATCH_INVARIANT": "1"})
    assert result.worker.batch_invariant
    assert "--batch-invariant" in settings.service_arguments(result.worker)
    other = {"VLLM_BATCH_INVARIANT": "1", "QUIRE_BATCH_INVARIANT": "false"}
    assert not settings.read({}, other).worker.batch_invariant
    assert not settings.read({"batch_invariant": False}, {"VLLM_BATCH_INVARIANT": "1"}).worker.batch_invariant


def test_the_variable_of_vllm_lets_clients_reset_the_prefix_cache() -> None:
    assert not settings.read({}, {"VLLM_SERVER_DEV_MODE": "0"}).gateway.enable_reset_prefix_cache
    result = settings.read({}, {"VLLM_SERVER_DEV_MODE": "1"})
    assert "--enable-reset-prefix-cache" in settings.service_arguments(result.gateway)
    other = {"VLLM_SERVER_DEV_MODE": "1", "QUIRE_ENABLE_RESET_PREFIX_CACHE": "false"}
    assert not settings.read({}, other).gateway.enable_reset_prefix_cache


@pytest.mark.parametrize(
    ("arguments", "own"),
    [
        ({"trust_remote_code": True, "max_paddings": 4, "disable_log_stats": False}, {}),
        ({"swap_space": 4, "preemption_mode": "swap"}, {"swap_space": 4, "preemption_mode": "swap"}),
        ({"max_model_len": "auto", "nnodes": 1, "hf_overrides": None, "rope_scaling": None}, {}),
        ({"max_model_len": -1}, {}),
        ({"tensor_parallel_size": 2}, {"tensor_parallel_size": 2}),
        ({"cpu_offload_gb": 0.0, "logits_processors": [], "hf_overrides": {}}, {}),
        ({"nnodes": np.int64(1), "data_parallel_size": np.int64(1)}, {}),
        ({"kv_cache_memory_bytes": 2**30}, {"kv_cache_memory": 1.0}),
        ({"quantization": "awq_marlin", "seed": 1}, {"quantization": "awq"}),
    ],
)
def test_arguments_of_llm_go_through_the_same_tables(arguments: dict[str, Any], own: dict[str, Any]) -> None:
    """API-02: a script for vLLM needs another import line, and nothing else."""
    named = {"quantization": None, "max_model_len": None, "kv_cache_memory": None, "swap_space": None}
    named["tensor_parallel_size"] = None
    assert translate_arguments(named, arguments) == own


def test_the_defaults_of_vllms_llm_are_taken() -> None:
    """API-02: the arguments of its constructor (0.32), and some that a program passes on from its command line."""
    named = {"model": "m", "dtype": "auto", "tokenizer": None, "revision": None, "quantization": None}
    named |= {"gpu_memory_utilization": None, "enforce_eager": None, "tokenizer_revision": None, "seed": None}
    named["tensor_parallel_size"] = None
    defaults = {
        "runner": "auto", "convert": "auto", "tokenizer": None, "tokenizer_mode": "auto", "skip_tokenizer_init": False,
        "trust_remote_code": False, "allowed_local_media_path": "", "allowed_media_domains": None,
        "tensor_parallel_size": 1, "quantization": None, "revision": None, "tokenizer_revision": None,
        "chat_template": None, "gpu_memory_utilization": 0.92, "cpu_offload_gb": 0, "offload_group_size": 0,
        "offload_num_in_group": 1, "offload_prefetch_step": 1, "offload_params": None, "enforce_eager": False,
        "enable_return_routed_experts": False, "return_sampling_mask": False, "disable_custom_all_reduce": False,
        "hf_overrides": None, "mm_processor_kwargs": None, "pooler_config": None, "structured_outputs_config": None,
        "profiler_config": None, "attention_config": None, "kv_cache_memory_bytes": None, "compilation_config": None,
        "quantization_config": None, "logits_processors": None, "spec_method": None, "spec_model": None,
        "spec_tokens": None, "reasoning_parser": "", "enable_log_requests": False, "scheduling_policy": "fcfs",
    }  # fmt: skip
    taken = translate_arguments(named, defaults)
    assert taken == {
        "model": "m", "dtype": "auto", "gpu_memory_utilization": 0.92, "enforce_eager": False,
        "tensor_parallel_size": 1, "scheduling_policy": "fcfs", "reasoning_parser": "auto",
    }  # fmt: skip


def test_settings_of_text_are_arguments_of_llm_too() -> None:
    arguments = {"chat_template": Path("a.jinja"), "default_chat_template_kwargs": {"a": 1}, "max_logprobs": 5}
    assert translate_arguments({}, arguments) == {
        "chat_template": "a.jinja", "default_chat_template_kwargs": '{"a": 1}', "max_logprobs": 5
    }  # fmt: skip


@pytest.mark.parametrize("arguments", [{"shutdown_timeout": 5}, {"uvicorn_log_level": "debug"}, {"drain_timeout": 5}])
def test_settings_of_the_server_are_no_arguments_of_llm(arguments: dict[str, Any]) -> None:
    """`LLM` would ignore them silently."""
    with pytest.raises(ConfigError, match="LLM has no argument"):
        translate_arguments({"quantization": None}, arguments)


def test_llm_is_one_engine() -> None:
    with pytest.raises(ConfigError, match="data_parallel_size=2 is not supported: LLM is one engine"):
        translate_arguments({"quantization": None}, {"data_parallel_size": 2})


def test_every_name_stands_once_and_none_is_a_setting_of_quire() -> None:
    rows = [*vllm_settings.ACCEPTED.values(), *vllm_settings.REFUSED.values()]
    names = [word.partition("=")[0].rstrip("!") for row in rows for word in row.split()]
    own = {knob.name for knob in settings.public_knobs()}
    assert sorted(names) == sorted(set(names))
    assert not own & (set(names) | set(vllm_settings.RENAMED))
    assert set(vllm_settings.RENAMED.values()) <= own
    assert {name.replace("-", "_") for name in vllm_settings.SHORT_FLAGS.values()} <= set(names) | own
    assert set(names) >= vllm_settings.LIST_FLAGS


def test_the_page_has_all_flags() -> None:
    """`quire knobs --vllm` writes it."""
    assert len(re.findall(r"`--", vllm.markdown_page())) > 250
