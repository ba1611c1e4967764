"""Whole models on the GPU's operations give transformers' logits, and the tokens of the reference's operations."""

import logging
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import cast
from unittest.mock import patch

import pytest
import torch

from kernels.load import gpu, kv_cache_dtypes, ops, reference, version
from kernels.ops import Ops
from services.worker.config import WorkerConfig
from services.worker.decode_graphs import Capture, cuda_capture, repeat
from services.worker.models.causal_lm import CausalLM
from services.worker.models.fingerprint import fingerprint
from services.worker.models.load import load_model
from services.worker.models.precision import Precision
from services.worker.runner import ModelRunner
from services.worker.start import choose_capture, choose_ops, model_info
from services.worker.warmup import Measurements
from shared.errors import ConfigError
from shared.protocol import Fork, NewSequence, Sampling, TableWrite, pack_tokens
from tests.models.family_variants import VARIANTS, qwen2
from tests.models.test_model_kv_bias import with_biases
from tests.models.tiny_models import Forward, llama, reference_logits, save
from tests.worker.runner_client import RunnerClient

TOKENS = [[(7 + 31 * i) % 90 for i in range(21)], [(11 + 17 * i) % 90 for i in range(6)]]


@pytest.mark.parametrize("family", ["llama", "qwen3, biases, window", "gemma2", "gpt2", "mixtral, window"])
def test_logits_are_transformers(family: str, device: torch.device, tmp_path: Path) -> None:
    """A prompt in two chunks beside a neighbour that decodes: rows of 13, 8 and 1 tokens in blocks out of order."""
    model = VARIANTS[family]()
    forward = Forward(save(model, tmp_path), device=device, operations=gpu(), dtype="float32")
    first, second = TOKENS
    forward.enter(0, first, [9, 2, 30, 4, 11, 7])
    forward.enter(3, second, [5, 1])
    steps = [forward.step((0, 0, 13), (3, 0, 5)), forward.step((3, 5, 1), (0, 13, 8))]
    ours = [torch.cat((steps[0][0], steps[1][1])), torch.cat((steps[0][1], steps[1][0]))]
    for logits, tokens in zip(ours, TOKENS, strict=True):
        torch.testing.assert_close(logits.cpu(), reference_logits(model, tokens), rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize(
    ("family", "dtype", "kv_cache_dtype", "bound"),
    [
        ("llama", "float32", "fp8", 0.25),
        ("qwen2, large biases", "float32", "fp8", 0.25),
        ("qwen2, large biases", "float32", "int8", 0.1),
        ("llama", "float16", "float32", 0.02),
    ],
)
def test_caches_of_other_types_give_nearly_transformers_logits(
    family: str, dtype: str, kv_cache_dtype: str, bound: float, device: torch.device, tmp_path: Path
) -> None:
    """With eight bits, a step is larger than the differences between tokens if large biases go into the cache."""
    model = with_biases(qwen2(), "k_proj", 300) if family.startswith("qwen2") else VARIANTS[family]()
    folder, tokens = save(model, tmp_path), TOKENS[0]
    forward = Forward(folder, device=device, operations=gpu(), dtype=dtype, kv_cache_dtype=kv_cache_dtype)
    forward.enter(0, tokens, [9, 2, 30, 4, 11, 7])
    logits = torch.cat([forward.step((0, start, count))[0] for start, count in ((0, 13), (13, 8))])
    expected = reference_logits(model, tokens)
    assert 1e-4 < (logits.cpu() - expected).norm() / expected.norm() < bound


@pytest.mark.parametrize("graphs", [False, True], ids=["launched", "graphs"])
def test_a_runner_samples_the_references_tokens(graphs: bool, device: torch.device, tmp_path: Path) -> None:
    """Prompts, decodes, a fork and a copied block, with every kind of sampling side by side.

    Decodes also run in graphs of more rows than the batch has. On a CPU, a graph runs its function again.
    """
    folder = save(llama(), tmp_path)
    capture = recorded if device.type == "cpu" else cuda_capture()
    recorded_runs.clear()
    ours = tokens_of(folder, device, gpu(), capture if graphs else None)
    assert ours == tokens_of(folder, device, reference())
    assert len(recorded_runs) == (2 if graphs else 0) or device.type != "cpu"


recorded_runs: list[None] = []


def recorded(run: Callable[[], object]) -> Callable[[], object]:
    """Capture a function as `repeat` does, and note each run of its graph."""
    graph = repeat(run)

    def replay() -> None:
        recorded_runs.append(None)
        graph()

    return replay


def tokens_of(
    folder: Path, device: torch.device, operations: Ops, capture: Capture | None = None
) -> list[dict[int, list[int]]]:
    config = WorkerConfig(model=str(folder), device=device.type, dtype="float32")
    loaded = load_model(folder, config, device, operations)
    info = model_info(loaded, config, folder)
    with patch("services.worker.runner.warm_up", lambda *_: Measurements(1.0, 1.0)):  # slow if interpreted
        runner = ModelRunner(
            loaded, info, config, device, operations, new_capture=(lambda: capture) if capture else None
        )
    client = RunnerClient(runner, slots=5)
    params = [
        Sampling(max_tokens=9, seed=1, temperature=0.0, logprobs=2),
        Sampling(max_tokens=9, seed=2, temperature=0.8, top_k=7, repetition_penalty=1.3),
        Sampling(max_tokens=9, seed=3, temperature=1.2, top_p=0.8, min_p=0.01, presence_penalty=0.5),
    ]
    tables = [[9, 2, 30, 4, 11, 7], [5, 1], [20, 3, 8, 6, 12, 13]]
    new = [
        NewSequence(slot, pack_tokens(TOKENS[slot % 2]), len(TOKENS[slot % 2]), blocks, sampling, 0)
        for slot, (blocks, sampling) in enumerate(zip(tables, params, strict=True))
    ]
    results = [client.run((0, 0, 21, 1), (1, 0, 6, 1), (2, 0, 21, 1), new=new, forks=[Fork(2, [(4, 1)])])]
    copies = [(13, 14)]  # the last block that the fork shares
    writes = [TableWrite(4, 5, [14])]
    results.append(client.run((0, 21, 1, 1), (1, 6, 1, 1), (2, 21, 1, 1), (4, 21, 1, 1), writes=writes, copies=copies))
    results.append(client.run((0, 22, 1, 1), (1, 7, 1, 1), (2, 22, 1, 1), (4, 22, 1, 1)))
    return [{slot: row.tokens for slot, row in result.items()} for result in results]


@pytest.mark.parametrize(
    ("capability", "rocm", "is_gpu"),
    [((7, 5), None, False), ((8, 0), None, True), ((9, 0), None, True), ((10, 0), None, True), ((9, 4), "6.4", False)],
)
def test_older_gpus_and_amds_get_the_reference_and_a_line_in_the_log(
    capability: tuple[int, int],
    rocm: str | None,
    is_gpu: bool,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    monkeypatch.setattr(torch.version, "hip", rocm)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "Some GPU")
    with caplog.at_level(logging.WARNING):
        assert ops(torch.device("cuda")) is (gpu() if is_gpu else reference())
    assert len(caplog.messages) == (not is_gpu)
    assert version(torch.device("cuda")).startswith("triton 3." if is_gpu else "reference")


def test_a_cpu_takes_the_kernels_if_they_are_interpreted(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """The log and the fingerprint say so. Without Triton's variable, the CPU's own serve."""
    cpu = torch.device("cpu")
    with caplog.at_level(logging.WARNING):
        monkeypatch.setenv("TRITON_INTERPRET", "1")
        assert (ops(cpu), ops(cpu, batch_invariant=True)) == (gpu(), gpu(batch_invariant=True))
        versions = {version(cpu), version(cpu, batch_invariant=True)}
        assert len(caplog.messages) == 2
        monkeypatch.delenv("TRITON_INTERPRET")
        assert ops(cpu) not in (gpu(), gpu(batch_invariant=True))
        versions.add(version(cpu))
    assert len(versions) == 3
    assert sum("interpreted" in text for text in versions) == 2
    assert sum("interpreted" in text for text in caplog.messages) == 2


def test_who_gets_graphs(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Models of Quire's own on operations that wait for nothing, unless --enforce-eager is set."""
    monkeypatch.setattr("services.worker.start.cuda_capture", lambda: recorded)
    cpu, cuda, config = torch.device("cpu"), torch.device("cuda"), WorkerConfig(device="cpu")
    loaded = load_model(save(llama(), tmp_path), config, cpu, gpu())
    for operations, device, expected in (
        (gpu(), cpu, repeat),
        (gpu(), cuda, recorded),
        (gpu(batch_invariant=True), cuda, recorded),
    ):
        new_capture = choose_capture(loaded, operations, device, config)
        assert new_capture is not None
        assert new_capture() is expected
    assert choose_capture(loaded, reference(), cuda, config) is None
    assert choose_capture(loaded, gpu(), cuda, WorkerConfig(enforce_eager=True)) is None
    of_transformers = replace(loaded, model=cast(CausalLM, object()))
    assert choose_capture(of_transformers, gpu(), cuda, config) is None


@pytest.mark.parametrize(("capability", "taken"), [((8, 0), False), ((8, 6), False), ((8, 9), True), ((9, 0), True)])
def test_a_gpu_before_ada_takes_no_float8(
    capability: tuple[int, int], taken: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability)
    types = kv_cache_dtypes(gpu(), torch.device("cuda"))
    assert (torch.float8_e4m3fn in types) is taken
    assert types | {torch.float8_e4m3fn} == gpu().kv_cache_dtypes


def test_batch_invariance_needs_the_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    """An older GPU's products are the vendor's. Elsewhere the mode is part of the fingerprint, since bits differ."""
    cuda, config = torch.device("cuda"), WorkerConfig(batch_invariant=True)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "Some GPU")
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (7, 5))
    with pytest.raises(ConfigError, match="--batch-invariant needs a GPU from Ampere on, not Some GPU"):
        choose_ops(cuda, config)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (8, 0))
    assert choose_ops(cuda, config) is gpu(batch_invariant=True) is not gpu()
    float32 = Precision(torch.float32, None, torch.float32)
    assert len({fingerprint("", float32, cuda, batch_invariant=mode) for mode in (False, True)}) == 2
