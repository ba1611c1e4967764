"""Tests adapters in the runner: plans put them into slots, sequences name slots, forks inherit them."""

from pathlib import Path

import pytest
from msgspec.structs import replace

from kernels.cpu import extension
from kernels.load import reference
from services.worker.config import WorkerConfig
from services.worker.models.load import load_model
from services.worker.runner import ModelRunner
from services.worker.start import start_runner
from shared.errors import ModelError
from shared.protocol import Fork
from tests.models.forward import CPU
from tests.models.peft_adapters import adapted, make_adapter
from tests.models.tiny_models import llama, reference_logits, save
from tests.worker.runner_client import RunnerClient, sequence

PROMPT = [5, 9, 100, 3, 77, 12, 8, 8, 41, 90]
COUNT = 6


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    """Return a model's folder, and those of three adapters."""
    path, model = tmp_path_factory.mktemp("model"), llama()
    adapters = (make_adapter(model, path / str(seed), seed=seed, pickled=seed == 2) for seed in range(3))
    return [save(model, path / "model"), *adapters]


@pytest.fixture(scope="module")
def runner(folders: list[Path]) -> ModelRunner:
    settings = {"device": "cpu", "num_threads": 1, "kv_cache_memory": 0.01}
    return start_runner(WorkerConfig(model=str(folders[0]), enable_lora=True, max_loras=2, max_cpu_loras=3, **settings))


def expected(adapter: Path | None) -> list[int]:
    """Return the greedy tokens that follow the prompt, by PEFT."""
    model = adapted(llama(), adapter) if adapter else llama()
    tokens = list(PROMPT)
    for _ in range(COUNT):
        tokens.append(int(reference_logits(model, tokens)[-1].argmax()))
    return tokens[len(PROMPT) :]


def test_info(runner: ModelRunner) -> None:
    assert (runner.info.max_loras, runner.info.max_cpu_loras) == (2, 3)


def test_sequences_of_adapters_and_of_none(runner: ModelRunner, folders: list[Path]) -> None:
    _, *adapters = folders
    client = RunnerClient(runner)
    digests = [runner.load_adapter(number, str(adapter)) for number, adapter in enumerate(adapters)]
    assert len(set(digests)) == 3
    new = [sequence(slot, PROMPT, range(slot * 8, slot * 8 + 8), adapter_slot=slot - 1) for slot in range(3)]
    rows = client.run(*((slot, 0, 10, 1) for slot in (1, 2, 0)), new=new, adapters=[(0, 2), (1, 0)])
    outputs = {slot: list(rows[slot].tokens) for slot in range(3)}
    for step in range(1, COUNT):
        rows = client.run(*((slot, 9 + step, 1, 1) for slot in (2, 0, 1)))
        for slot, tokens in outputs.items():
            tokens += rows[slot].tokens
    assert outputs == {0: expected(None), 1: expected(adapters[2]), 2: expected(adapters[0])}
    assert len({tuple(tokens) for tokens in outputs.values()}) == 3

    # The slot of a sequence that has ended takes another adapter.
    new = [sequence(1, PROMPT, range(8, 16), adapter_slot=0)]
    rows = client.run((1, 0, 10, 1), new=new, released=[1], adapters=[(0, 1)])
    assert rows[1].tokens + client.decode(1, 11, COUNT - 1) == expected(adapters[1])


def test_a_fork_uses_the_adapter_of_its_parent(runner: ModelRunner, folders: list[Path]) -> None:
    client = RunnerClient(runner)
    runner.load_adapter(5, str(folders[1]))
    rows = client.run(
        (0, 0, 10, 1),
        new=[sequence(0, PROMPT, range(8), adapter_slot=1)],
        forks=[Fork(0, [(3, 1)])],
        adapters=[(1, 5)],
    )
    rows_of_child = client.run((3, 10, 1, 1))
    assert [*rows[3].tokens, *rows_of_child[3].tokens] == expected(folders[1])[:2]


def test_a_new_epoch_forgets_adapters(runner: ModelRunner, folders: list[Path]) -> None:
    RunnerClient(runner)
    runner.load_adapter(7, str(folders[1]))
    client = RunnerClient(runner)
    with pytest.raises(ModelError, match="adapter 7 was not loaded"):
        client.run(adapters=[(0, 7)])


def test_unloading(runner: ModelRunner, folders: list[Path]) -> None:
    client = RunnerClient(runner)
    runner.load_adapter(8, str(folders[1]))
    runner.unload_adapter(8)
    runner.unload_adapter(8)
    with pytest.raises(ModelError, match="adapter 8 was not loaded"):
        client.run(adapters=[(0, 8)])


def test_without_the_setting_there_are_none(folders: list[Path]) -> None:
    config = WorkerConfig(model=str(folders[0]), device="cpu", num_threads=1, kv_cache_memory=0.01)
    plain = start_runner(config)
    assert (plain.info.max_loras, plain.info.max_cpu_loras) == (0, 0)
    with pytest.raises(ModelError, match="takes no adapters without --enable-lora"):
        plain.load_adapter(1, str(folders[1]))


def test_the_fingerprint_is_that_of_the_model_alone(runner: ModelRunner, folders: list[Path]) -> None:
    """Rows without an adapter compute the same, so a gateway may move them to an engine without adapters."""
    plain = load_model(folders[0], WorkerConfig(device="cpu"), CPU, reference())
    with_adapters = load_model(folders[0], WorkerConfig(device="cpu", enable_lora=True), CPU, reference())
    assert plain.fingerprint == with_adapters.fingerprint == runner.info.model.fingerprint


@pytest.mark.skipif(not extension.load(), reason="only the compiled kernels are batch-invariant")
def test_tokens_without_an_adapter_are_those_of_a_worker_that_takes_none(folders: list[Path]) -> None:
    config = WorkerConfig(model=str(folders[0]), device="cpu", num_threads=1, kv_cache_memory=0.01)
    results = []
    for settings in (config, replace(config, enable_lora=True)):
        client = RunnerClient(start_runner(settings))
        rows = client.run((0, 0, 10, 1), new=[sequence(0, PROMPT, range(8), logprobs=5, prompt_logprobs=5)])
        results.append((rows[0].tokens, rows[0].logprobs, rows[0].prompt_logprobs))
    assert results[0] == results[1]
