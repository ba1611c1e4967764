"""Tests `quire serve` with adapters (LoRA): real processes, a tiny model, and PEFT's adapters."""

import json
import re
import threading
import urllib.error
import urllib.request
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from quire.settings import read
from quire.startup_checks import check_adapters
from shared.errors import ConfigError
from tests.quire.adapter_folders import NAMES
from tests.quire.quire_server import serving
from tests.quire.test_quire_serve import kill_and_await_the_next, post, wait_for
from tests.waiting import PATIENCE

PROMPTS = [f"The quick brown fox {index}" for index in range(16)]
FLAGS = ("--enable-lora", "--max-loras=4", "--enable-lora-runtime-updates", "--max-num-seqs=32", "--dtype=float32")
TOKENS = 90


def test_streams_of_four_adapters_outlive_a_worker_bit_by_bit(folder: Path, adapters: Path, tmp_path: Path) -> None:
    modules = [f"--lora-modules={name}={adapters / name}" for name in NAMES]
    with serving(folder, tmp_path, *FLAGS, *modules) as server, ThreadPoolExecutor(16) as clients:
        url = server.url

        def text(index: int) -> str:
            body = {"model": NAMES[index % 4], "prompt": PROMPTS[index], "max_tokens": TOKENS, "temperature": 0.7}
            answer = post(f"{url}/v1/completions", body | {"seed": index, "ignore_eos": True})
            assert answer["model"] == NAMES[index % 4]
            assert answer["usage"]["completion_tokens"] == TOKENS
            return str(answer["choices"][0]["text"])

        undisturbed = list(clients.map(text, range(16)))
        alone = [text(index) for index in (0, 5, 10, 15)]
        assert alone == [undisturbed[index] for index in (0, 5, 10, 15)]
        killed = threading.Event()

        def texts(index: int) -> set[str]:
            """Return what one client gets that asks again and again until the worker was replaced."""
            received = {text(index)}
            while not killed.is_set():
                received.add(text(index))
            return received

        disturbed = [clients.submit(texts, index) for index in range(16)]
        try:
            wait_for(lambda: server_runs(url, 4), server)
            kill_and_await_the_next(server, "worker")
        finally:
            killed.set()  # or the clients would ask forever
        assert [one.result() for one in disturbed] == [{one} for one in undisturbed]
        with pytest.raises(urllib.error.HTTPError) as refused:
            post(f"{url}/v1/load_lora_adapter", {"lora_name": "x", "lora_path": str(adapters / "broken")})
        with refused.value as response:
            assert response.status == 400
            assert "use_dora is not supported" in json.load(response)["error"]["message"]
        assert text(3) == undisturbed[3]


def server_runs(url: str, count: int) -> bool:
    """Return whether so many sequences run."""
    with urllib.request.urlopen(f"{url}/metrics") as response:
        text = response.read().decode()
    running = re.search(r"^vllm:num_requests_running\{.*\} (\S+)$", text, re.MULTILINE)
    return running is not None and float(running[1]) >= count


def test_an_adapter_that_does_not_fit_ends_the_start(folder: Path, adapters: Path, tmp_path: Path) -> None:
    module = f"--lora-modules=bad={adapters / 'broken'}"
    with serving(folder, tmp_path, *FLAGS, module) as server:
        assert server.process.wait(2 * PATIENCE) != 0
        said = server.err.read_text()
    assert f"scheduler: --lora-modules bad={adapters / 'broken'}: " in said
    assert "use_dora is not supported" in said
    assert "Traceback" not in said


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        ({"lora_modules": ["a=/a"]}, "--lora-modules needs --enable-lora"),
        ({"lora_modules": ["a"], "enable_lora": "true"}, "must be NAME=PATH"),
        ({"lora_modules": ["a" * 4097 + "=/a"], "enable_lora": "true"}, "at most 4096 characters"),
        ({"lora_modules": ["m=/a"], "enable_lora": "true"}, "'m' is a name of the model itself"),
        (
            {"lora_modules": ['{"name": "a", "path": "/a", "base_model_name": "other"}'], "enable_lora": "true"},
            "its base model 'other' is not served here",
        ),
    ],
)
def test_settings_that_cannot_work_end_the_start_at_once(flags: dict[str, object], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        check_adapters(read({"model": "m", **flags}, {}))


def test_settings_of_adapters_reach_their_services() -> None:
    module = '{"name": "a", "path": "/a", "base_model_name": "m"}'
    flags = {"model": "m", "enable_lora": True, "lora_modules": [module], "max_loras": "4"}
    settings = read(flags, {"VLLM_ALLOW_RUNTIME_LORA_UPDATING": "True"})
    check_adapters(settings)
    assert settings.scheduler.lora_modules == [module]
    assert (settings.worker.enable_lora, settings.worker.max_loras) == (True, 4)
    assert settings.gateway.enable_lora_runtime_updates
