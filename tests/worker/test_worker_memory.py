"""The memory of a GPU that steps and KV take, with a device whose numbers the test says."""

import logging
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch

from kernels.load import ops
from services.worker import kv_memory as kv_memory_module
from services.worker.config import WorkerConfig
from services.worker.interface import OutOfMemory
from services.worker.kv_memory import GIB, host_kv_memory, kv_memory
from services.worker.models.causal_lm import ModelShape
from services.worker.models.load import load_model
from services.worker.runner import ModelRunner
from services.worker.start import model_info
from services.worker.warmup import StepMemory, kernel_plans, largest_plan, largest_sizes
from shared.errors import ConfigError
from tests.models.tiny_models import llama, save

CPU, CUDA = torch.device("cpu"), torch.device("cuda")
SHAPE = ModelShape(architecture="", vocab_size=100, max_positions=2048, num_layers=2, num_kv_heads=2, head_dim=8)


def test_kv_gets_what_is_left(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (60 * GIB, 80 * GIB))
    config, needed = WorkerConfig(gpu_memory_utilization=0.9), StepMemory(1 * GIB, 5 * GIB, 2 * GIB)
    with caplog.at_level(logging.INFO):
        assert kv_memory(config, CUDA, needed) == (72 - 20 - 8) * GIB
    assert caplog.messages == [
        "GPU memory, of 80.0 GiB: in use after loading 20.00, sequences and positions 1.00, the largest step 5.00, "
        "graphs 2.00, KV 44.00"
    ]
    with pytest.raises(ConfigError, match=r"--gpu-memory-utilization 0\.3 leaves .* --max-num-batched-tokens"):
        kv_memory(WorkerConfig(gpu_memory_utilization=0.3), CUDA, needed)


def test_workers_of_one_machine_divide_its_free_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kv_memory_module, "available_memory", lambda: 12 * GIB)
    assert [kv_memory(WorkerConfig(local_world_size=count), CPU, None) / GIB for count in (1, 2, 3)] == [3, 1.5, 1]
    assert kv_memory(WorkerConfig(local_world_size=2, kv_cache_memory=7), CPU, None) == 7 * GIB
    monkeypatch.setattr(kv_memory_module, "available_memory", lambda: 160 * GIB)
    assert kv_memory(WorkerConfig(local_world_size=4), CPU, None) == 4 * GIB


def test_swapped_blocks_get_four_gib_at_most_an_eighth_or_what_is_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    def memory(device: torch.device = CPU, **settings: Any) -> float:
        return host_kv_memory(WorkerConfig(**settings), device) / GIB

    monkeypatch.setattr(kv_memory_module, "available_memory", lambda: 12 * GIB)
    assert [memory(local_world_size=count) for count in (1, 2)] == [1.5, 0.75]
    assert [memory(swap_space=size) for size in (0, 0.5, 20)] == [0, 0.5, 20]
    assert [memory(kv_cache_memory=size) for size in (4, 11, 13)] == [1, 0.125, 0]  # it is the same memory
    assert memory(CUDA, kv_cache_memory=11) == 1.5
    monkeypatch.setattr(kv_memory_module, "available_memory", lambda: 160 * GIB)
    assert memory() == 4


def test_the_largest_step_has_the_schedulers_sizes() -> None:
    sizes = largest_sizes(WorkerConfig(max_num_seqs=16, max_model_len=500), SHAPE, CUDA)
    assert (sizes.max_num_seqs, sizes.max_model_len, sizes.max_num_batched_tokens) == (16, 500, 16 + 8192)
    assert largest_sizes(WorkerConfig(max_num_batched_tokens=77), SHAPE, CUDA).max_num_batched_tokens == 77
    plan = largest_plan(sizes)
    assert [row.count for row in plan.rows] == [500] * 16  # more would not fit into the budget's 8,208
    few = largest_plan(
        largest_sizes(WorkerConfig(max_num_seqs=16, max_model_len=500, max_num_batched_tokens=900), SHAPE, CUDA)
    )
    assert [row.count for row in few.rows] == [500, 386] + [1] * 14
    assert all(row.samples and row.start + row.count <= 500 for row in plan.rows)
    small = largest_plan(largest_sizes(WorkerConfig(max_num_seqs=3, max_num_batched_tokens=7), SHAPE, CUDA))
    assert [row.count for row in small.rows] == [5, 1, 1]
    tiny = largest_plan(largest_sizes(WorkerConfig(max_num_seqs=9, max_num_batched_tokens=4), SHAPE, CUDA))
    assert [row.count for row in tiny.rows] == [1] * 4


def test_a_step_without_memory_names_the_settings(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    settings, operations = WorkerConfig(device="cpu", num_threads=1), ops(CPU)
    folder = save(llama(), tmp_path)
    loaded = load_model(folder, settings, CPU, operations)
    runner = ModelRunner(loaded, model_info(loaded, settings, folder), settings, CPU, operations)
    sizes = largest_sizes(settings, loaded.model.shape, CPU)
    runner.configure(sizes)

    def forward(*_: object) -> None:
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB")

    monkeypatch.setattr(loaded.model, "forward", forward)
    plan = largest_plan(sizes)
    with pytest.raises(OutOfMemory, match=f"a step of {sum(row.count for row in plan.rows)} tokens and 128 sequences"):
        runner.launch(plan)


@pytest.mark.parametrize("blocks", ["num_blocks", "num_host_blocks"])
def test_blocks_that_the_host_has_no_memory_for_name_the_settings(blocks: str, tmp_path: Path) -> None:
    settings, operations = WorkerConfig(device="cpu", num_threads=1), ops(CPU)
    folder = save(llama(), tmp_path)
    loaded = load_model(folder, settings, CPU, operations)
    runner = ModelRunner(loaded, model_info(loaded, settings, folder), settings, CPU, operations)
    sizes = msgspec.structs.replace(largest_sizes(settings, loaded.model.shape, CPU), **{blocks: 2**31 - 1})
    with pytest.raises(OutOfMemory, match=r"out of the host's memory for .* blocks of KV: smaller --kv-cache-memory"):
        runner.configure(sizes)


@pytest.mark.parametrize("config", [{}, {"max_num_seqs": 1, "max_model_len": 2}], ids=str)
def test_the_first_steps_run_on_a_real_model(config: dict[str, int], tmp_path: Path) -> None:
    """All kinds of sampling are among them, and prompts with log-probabilities of every size."""
    settings = WorkerConfig(device="cpu", num_threads=1, **({"max_num_seqs": 8, "max_num_batched_tokens": 60} | config))
    operations = ops(CPU)
    folder = save(llama(), tmp_path)
    loaded = load_model(folder, settings, CPU, operations)
    runner = ModelRunner(loaded, model_info(loaded, settings, folder), settings, CPU, operations)
    sizes = largest_sizes(settings, loaded.model.shape, CPU)
    runner.configure(sizes)
    result = runner.execute(largest_plan(sizes))
    assert [len(row.tokens) for row in result.rows] == [1] * settings.max_num_seqs
    assert all(row.logprobs for row in result.rows)
    for plan in kernel_plans(sizes, loaded.model.shape.vocab_size):
        (row,) = runner.execute(plan).rows
        assert row.tokens
        assert row.logprobs
