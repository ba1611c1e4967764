"""Tests `quire serve` with several ranks for an engine: real processes that speak by Gloo, a tiny model, and kills."""

import os
import signal
import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import psutil
import pytest

from tests.quire.adapter_folders import NAMES
from tests.quire.quire_server import Server, healthy, serving
from tests.quire.test_quire_serve import figure, post, wait_for
from tests.waiting import PATIENCE

PROMPTS = [f"The quick brown fox {index}" for index in range(8)]
FLAGS = ("--device=cpu", "--dtype=float32", "--max-num-seqs=16")


def answer(url: str, index: int, *, model: str = "tiny") -> list[Any]:
    """Return the tokens of a stream, half of which are sampled, with their log-probabilities."""
    body = {"model": model, "prompt": PROMPTS[index], "max_tokens": 90, "seed": index, "ignore_eos": True}
    body |= {"temperature": index % 2, "logprobs": 1}
    choice = post(f"{url}/v1/completions", body)["choices"][0]["logprobs"]
    assert len(choice["tokens"]) == 90
    return [choice["tokens"], choice["token_logprobs"]]


@contextmanager
def steady_load(ask: Callable[[int], list[Any]], expected: list[list[Any]]) -> Iterator[None]:
    """Let eight clients ask again and again for the time of the block. Fail if an answer is not as expected."""
    over = threading.Event()

    def ask_until_over(index: int) -> int:
        count = 0
        while not over.is_set() or not count:
            assert ask(index) == expected[index]
            count += 1
        return count

    with ThreadPoolExecutor(8) as clients:
        counts = [clients.submit(ask_until_over, index) for index in range(8)]
        try:
            yield
        finally:
            over.set()
        assert all(count.result() > 0 for count in counts)


def kill_and_await_others(server: Server, victim: psutil.Process) -> None:
    """Kill a process under load, and wait until the server is ready with all ranks again."""
    wait_for(lambda: figure(server.url, "vllm:num_requests_running{") >= 4, server)
    before = server.ranks()
    losses = figure(server.url, "quire:worker_losses_total{")
    victim.kill()
    wait_for(lambda: not victim.is_running(), server)
    if victim in before:
        wait_for(lambda: figure(server.url, "quire:worker_losses_total{") == losses + 1, server)
    wait_for(lambda: len(server.ranks()) == len(before) and healthy(server.url), server)


def test_streams_outlive_each_rank_and_the_scheduler_bit_by_bit(folder: Path, tmp_path: Path) -> None:
    with serving(folder, tmp_path, "-tp", "2", *FLAGS) as server:
        url = server.url
        assert len(server.ranks()) == 2
        with ThreadPoolExecutor(8) as clients:
            undisturbed = list(clients.map(partial(answer, url), range(8)))
        with steady_load(partial(answer, url), undisturbed):
            for rank in (0, 1):
                kill_and_await_others(server, server.ranks()[rank])
            kill_and_await_others(server, server.children()["scheduler"])
        assert server.stop(signal.SIGINT) == 0
        said = server.err.read_text()
    assert "worker rank 0 | ended (signal SIGKILL); starts again" in said
    assert "worker rank 1 | " in said
    assert "Traceback" not in said, "a rank that loses another one has a line for that"


@pytest.mark.skipif("QUIRE_TEST_RANKS" not in os.environ, reason="it takes minutes: make test-all runs it")
@pytest.mark.timeout(900)
@pytest.mark.parametrize("sizes", [("-tp=2", "-pp=2"), ("-tp=4",)], ids=["two stages", "one stage"])
def test_streams_outlive_each_of_four_ranks_bit_by_bit(sizes: Sequence[str], folder: Path, tmp_path: Path) -> None:
    with serving(folder, tmp_path, *sizes, *FLAGS) as server:
        url = server.url
        assert len(server.ranks()) == 4
        with ThreadPoolExecutor(8) as clients:
            undisturbed = list(clients.map(partial(answer, url), range(8)))
        with steady_load(partial(answer, url), undisturbed):
            for rank in range(4):
                kill_and_await_others(server, server.ranks()[rank])
        assert figure(url, "quire:worker_losses_total{") == 4
        assert server.stop(signal.SIGTERM) == 0


def test_two_stages_of_two_ranks_serve_adapters_and_swap(folder: Path, adapters: Path, tmp_path: Path) -> None:
    """They say what one rank says, and go on when a rank of the first stage dies."""
    modules = [f"--lora-modules={name}={adapters / name}" for name in NAMES[:2]]
    flags = ["--enable-lora", "--max-loras=2", "--swap-space=0.01", *FLAGS, *modules]
    small = ["--num-gpu-blocks-override=30", "--preemption-mode=swap"]  # for three streams and a half

    def ask(url: str, index: int) -> list[Any]:
        return answer(url, index, model=("tiny", *NAMES[:2])[index % 3])

    with serving(folder, tmp_path / "one", *flags) as server, ThreadPoolExecutor(8) as clients:
        on_one = list(clients.map(partial(ask, server.url), range(8)))
        assert server.stop(signal.SIGTERM) == 0
    with serving(folder, tmp_path / "four", "-tp=2", "-pp=2", *flags, *small) as server:
        url = server.url
        assert len(server.ranks()) == 4
        with ThreadPoolExecutor(3) as clients:  # as many as there is room for
            undisturbed = list(clients.map(partial(ask, url), range(8)))
        for (expected, one), (tokens, four) in zip(on_one, undisturbed, strict=True):
            assert tokens == expected
            assert all(abs(own - other) < 1e-4 for own, other in zip(one, four, strict=True))
        with steady_load(partial(ask, url), undisturbed):
            kill_and_await_others(server, server.ranks()[1])
        assert figure(url, "quire:swapped_preemptions_total{") > 0
        assert server.stop(signal.SIGTERM) == 0


def test_a_model_that_cannot_be_divided_so_ends_the_start(folder: Path, tmp_path: Path) -> None:
    with serving(folder, tmp_path, "-tp=4", "--device=cpu", "--quantization=int8") as server:
        assert server.process.wait(2 * PATIENCE) != 0
    last = server.err.read_text().splitlines()[-1]
    assert last.startswith("quire: worker rank ")
