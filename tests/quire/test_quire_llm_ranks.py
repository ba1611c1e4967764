"""Tests `LLM` with several ranks on a tiny model: what it says, and that no process outlives it."""

import gc
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest

from quire import LLM, SamplingParams
from quire.outputs import RequestOutput
from shared.errors import ConfigError, EngineFailure, ModelError
from tests.quire.quire_server import ROOT
from tests.waiting import wait_until

PROMPTS = ["What is the capital of France?", "The quick brown fox", "Paris is"]
GREEDY = SamplingParams(temperature=0, max_tokens=16, logprobs=2, prompt_logprobs=1, ignore_eos=True)
SAMPLED = SamplingParams(temperature=0.9, max_tokens=16, n=3, seed=4, ignore_eos=True)
LONG = SamplingParams(temperature=1, max_tokens=100, ignore_eos=True)
SETTINGS: dict[str, Any] = {"kv_cache_memory": 0.05, "num_threads": 1, "device": "cpu", "dtype": "float32"}


def ranks(llm_process: psutil.Process | None = None) -> list[psutil.Process]:
    """Return the processes of the other ranks of a process, by default of this one."""
    children = (llm_process or psutil.Process()).children()
    return [child for child in children if "services.worker" in child.cmdline()]


def generate(llm: LLM, params: SamplingParams) -> list[RequestOutput]:
    return llm.generate(PROMPTS, params, use_tqdm=False)


def generate_forever(llm: LLM) -> None:
    while True:
        generate(llm, LONG)


def generate_and_interrupt(llm: LLM, seconds: float) -> None:
    """Generate until a signal comes, after some seconds or sooner: whoever calls this must be ready for it."""
    threading.Timer(seconds, os.kill, (os.getpid(), signal.SIGINT)).start()
    generate_forever(llm)


def tokens(outputs: list[RequestOutput]) -> list[list[int]]:
    return [list(one.token_ids) for output in outputs for one in output.outputs]


@pytest.fixture(scope="module")
def on_one(folder: Path) -> Iterator[LLM]:
    with LLM(folder, **SETTINGS) as llm:
        yield llm


def test_a_model_that_cannot_be_divided_is_named_and_leaves_nothing(folder: Path) -> None:
    with pytest.raises(ModelError, match=r"--tensor-parallel-size 3: the model's attention heads, 4, cannot be"):
        LLM(folder, tensor_parallel_size=3, **SETTINGS)
    assert not ranks()
    with pytest.raises(ModelError, match=r"a rank's 8 of 32 inputs are not whole groups"):  # which only ranks find
        LLM(folder, tensor_parallel_size=4, **(SETTINGS | {"dtype": "auto", "quantization": "int8"}))
    assert not ranks()


def test_ranks_that_cannot_divide_the_heads_are_not_started(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A hundred of them would fill the memory first."""

    def start(*_: object) -> None:
        raise AssertionError("a group is started")

    monkeypatch.setattr("quire.engine.GroupRunner", start)
    with pytest.raises(ModelError, match=r"--tensor-parallel-size 100: the model's attention heads, 4, cannot be"):
        LLM(folder, tensor_parallel_size=100, **SETTINGS)


def test_too_few_gpus_are_named(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0")
    with pytest.raises(ConfigError, match="each of the 2 ranks needs a GPU of its own, and there are 1"):
        LLM(folder, tensor_parallel_size=2, **SETTINGS | {"device": "auto"})


def test_a_rank_that_dies_is_a_clear_error_and_the_next_llm_works(folder: Path) -> None:
    with LLM(folder, tensor_parallel_size=2, **SETTINGS) as llm:
        expected = tokens(generate(llm, GREEDY))
        (rank,) = ranks()
        threading.Timer(0.2, rank.kill).start()
        with pytest.raises(EngineFailure, match="cannot go on"):
            generate_forever(llm)
        with pytest.raises(EngineFailure, match="cannot go on"):
            generate(llm, GREEDY)
    assert not ranks()
    with LLM(folder, tensor_parallel_size=2, **SETTINGS) as llm:
        assert tokens(generate(llm, GREEDY)) == expected


@pytest.fixture(scope="module", params=[(2, 1), (1, 2)], ids=["tensor", "pipeline"])
def group(request: pytest.FixtureRequest, folder: Path) -> Iterator[LLM]:
    tensor, pipeline = request.param
    with LLM(folder, tensor_parallel_size=tensor, pipeline_parallel_size=pipeline, **SETTINGS) as llm:
        yield llm
    assert not ranks()


def test_two_ranks_say_what_one_says(group: LLM, on_one: LLM, folder: Path) -> None:
    """The tiny model's best two tokens are never near each other."""
    assert group.get_world_size() == 2
    assert len(ranks()) == 1
    with pytest.raises(ConfigError, match="one LLM of several ranks at a time"):
        LLM(folder, tensor_parallel_size=2, **SETTINGS)
    expected, outputs = generate(on_one, GREEDY), generate(group, GREEDY)
    assert tokens(outputs) == tokens(expected)
    for one, two in zip(expected, outputs, strict=True):
        pairs = zip((one.prompt_logprobs or [])[1:], (two.prompt_logprobs or [])[1:], strict=True)
        pairs_of_output = zip(one.outputs[0].logprobs or [], two.outputs[0].logprobs or [], strict=True)
        for own, other in [*pairs, *pairs_of_output]:
            assert own.keys() == other.keys()
            assert all(abs(own[token].logprob - other[token].logprob) < 1e-4 for token in own)


def test_forks_and_masks_work_on_two_ranks(group: LLM, on_one: LLM) -> None:
    assert tokens(generate(group, SAMPLED)) == tokens(generate(on_one, SAMPLED))
    words = SamplingParams(temperature=0, max_tokens=8, bad_words=[" is"], allowed_token_ids=list(range(3, 300)))
    assert tokens(generate(group, words)) == tokens(generate(on_one, words))


@pytest.fixture
def interruptible() -> Iterator[None]:
    """Let SIGINT raise KeyboardInterrupt, which background processes of a shell ignore. Disable the garbage collector:
    what is raised in one of its callbacks is lost, and Hypothesis has one.
    """
    former = signal.signal(signal.SIGINT, signal.default_int_handler)
    gc.disable()
    yield
    gc.enable()
    signal.signal(signal.SIGINT, former)


@pytest.mark.usefixtures("interruptible")
def test_a_second_call_and_an_interrupted_one_leave_it_usable(group: LLM) -> None:
    """It is interrupted at random moments, most of which are within steps."""
    first = tokens(generate(group, GREEDY))
    for index in range(10):
        with pytest.raises(KeyboardInterrupt):
            generate_and_interrupt(group, 0.1 + 0.0123 * index)
        assert tokens(generate(group, GREEDY)) == first


SCRIPT = """
import sys
from quire import LLM, SamplingParams
llm = LLM(sys.argv[1], tensor_parallel_size=2, kv_cache_memory=0.05, num_threads=1, device="cpu")
print(len(llm.generate("Paris", SamplingParams(max_tokens=4, ignore_eos=True))[0].outputs[0].token_ids), flush=True)
sys.stdin.read()
"""


@pytest.mark.parametrize("kills", [False, True])
def test_ranks_end_with_their_script(folder: Path, kills: bool) -> None:
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    argv = [sys.executable, "-c", SCRIPT, str(folder)]
    with subprocess.Popen(argv, stdin=subprocess.PIPE, stdout=subprocess.PIPE, env=environment, text=True) as script:
        assert script.stdout is not None
        assert script.stdout.readline() == "4\n"
        (rank,) = ranks(psutil.Process(script.pid))
        if kills:
            script.kill()
        script.communicate("")
        wait_until(lambda: not rank.is_running() or rank.status() == psutil.STATUS_ZOMBIE)
        assert kills or script.returncode == 0


FORK = """
import os, sys
from quire import LLM, SamplingParams
from shared.errors import QuireError
llm = LLM(sys.argv[1], kv_cache_memory=0.05, num_threads=1, device="cpu", tensor_parallel_size=int(sys.argv[2]))
generate = lambda: llm.generate("a", SamplingParams(max_tokens=2), use_tqdm=False)
generate()
pid = os.fork()
if pid == 0:
    try:
        generate()
    except QuireError as error:
        if "made before a fork" in str(error):
            if sys.argv[2] != "1":
                llm._engine.runner.close()  # as the interpreter's end does, which torch would wait for
            llm.close()
            os._exit(5)
    os._exit(3)
status = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
generate()
llm.close()
sys.exit(status)
"""


@pytest.mark.parametrize("ranks", ["1", "2"])
def test_a_fork_can_neither_use_nor_end_an_llm(folder: Path, ranks: str) -> None:
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    argv = [sys.executable, "-c", FORK, str(folder), ranks]
    result = subprocess.run(argv, env=environment, capture_output=True, text=True, timeout=120, check=False)
    assert result.returncode == 5, result.stderr
