"""Tests the command line: settings from every source, errors of one line with a status, and the announcement."""

import fcntl
import os
import shlex
import shutil
import signal
import socket
import subprocess
import sys
import time
from contextlib import suppress
from pathlib import Path
from tempfile import TemporaryDirectory

import pytest

from quire import settings
from quire.banner import banner, base_url, has_chat_template
from quire.local_services import children, connect_services
from quire.serve import free_port
from quire.service_log import ServiceLog
from services.gateway.config import GatewayConfig
from shared.config import load
from shared.errors import ConfigError
from shared.gguf.folder import model_folder
from shared.hub.embedded import RECOMMENDED, embedded_file

ROOT = Path(__file__).parents[2]


def quire(*argv: str, **variables: str) -> "subprocess.CompletedProcess[str]":
    environment = {**os.environ, "PYTHONPATH": str(ROOT), **variables}
    return subprocess.run(
        [sys.executable, "-m", "quire", *argv], capture_output=True, text=True, env=environment, timeout=60
    )


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        (["serve", "/no/such/model", "--port=0"], "quire: there is no folder /no/such/model"),
        (["serve", "--model=/no/such/model", "--port=0"], "quire: there is no folder /no/such/model"),
        (["serve", "--no-such-flag"], "quire: unrecognized arguments: --no-such-flag"),
        (["serve", "--port", "70000"], "quire: --port '70000': Expected `int` <= 65535"),
        (["serve", "--max-num-seqs", "many"], "quire: --max-num-seqs 'many': Expected `int`, got `str`"),
        (["serve", "a", "--model", "b"], "quire: two models are named: a and --model b"),
        (["serve", "--scheduler=ipc:///x"], "quire: unrecognized arguments: --scheduler=ipc:///x"),
        (["serve", "--config", "/no/such.yaml"], "quire: --config /no/such.yaml: No such file or directory"),
        (["serve", "--host", "not an address"], "quire: --host not an address: "),
        (["serve", "--max-num-batched-tokens=9"], "quire: --max-num-batched-tokens must be more than --max-num-seqs"),
        (["serve", "--priority-ageing=1"], "quire: --priority-ageing needs --scheduling-policy priority"),
        (["serve", "--max-model-len=1"], "quire: --max-model-len '1': Expected `int` >= 2"),
        (["serve", "--chat-template=/no/such", "--port=0"], "quire: cannot read the chat template /no/such"),
        (["serve", "--generation-config=/no/such", "--port=0"], "quire: --generation-config /no/such: there is no"),
        (["serve", "--tokenizer=/no/such", "--port=0"], "quire: --tokenizer: there is no folder /no/such"),
        (["pull", "/no/such/model"], "quire: there is no folder /no/such/model"),
    ],
)
def test_a_mistake_is_one_line_and_status_2(argv: list[str], message: str) -> None:
    result = quire(*argv)
    assert result.returncode == 2
    assert result.stderr.startswith(message)
    assert result.stderr.count("\n") == 1
    assert result.stdout == ""


def test_a_port_in_use_is_told_before_any_model_is_looked_at() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        result = quire("serve", "/no/such/model", "--host=127.0.0.1", "--port", str(port))
    assert result.returncode == 2
    assert result.stderr == f"quire: port {port} is in use; choose another one with --port\n"


def test_a_port_may_be_left_open_or_shared() -> None:
    port = free_port(GatewayConfig(host="127.0.0.1", port=0))
    assert port > 0
    with socket.socket() as other:
        other.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
        other.bind(("127.0.0.1", port))
        other.listen()
        assert free_port(GatewayConfig(host="127.0.0.1", port=port, reuse_port=True)) == port
        with pytest.raises(ConfigError, match="in use"):
            free_port(GatewayConfig(host="127.0.0.1", port=port))


def test_help_usage_and_version_work() -> None:
    assert "--gpu-memory-utilization" in quire("serve", "--help").stdout
    assert quire("--help").stdout.startswith("usage: quire COMMAND")
    assert quire().returncode == 2
    assert quire("fly").returncode == 2
    assert quire("fly").stderr.startswith("quire: there is no command fly\n\nusage: ")
    assert quire("version", "x").stderr.startswith("quire: version takes no arguments\n")
    assert quire("version").returncode == 0


def test_keys_are_made_once(tmp_path: Path) -> None:
    made = quire("keys", str(tmp_path / "keys"))
    assert made.returncode == 0
    paths = [Path(line) for line in made.stdout.splitlines()]
    assert len(paths) == 10
    assert all(path.is_file() for path in paths)
    again = quire("keys", str(tmp_path / "keys"))
    assert (again.returncode, again.stdout) == (0, f"{tmp_path}/keys has all keys\n")
    assert quire("keys").stderr.startswith("quire: keys takes one folder\n")
    (tmp_path / "file").touch()
    failed = quire("keys", str(tmp_path / "file"))
    assert (failed.returncode, failed.stderr.count("\n")) == (2, 1)


def test_models_are_listed_by_the_way_they_are_served() -> None:
    result = quire("models")
    native, others = result.stdout.split("\n\nThrough the modelling code of transformers")
    assert "  LlamaForCausalLM\n" in native
    assert "  GraniteForCausalLM\n" in others
    assert "  LlamaForCausalLM\n" not in others
    assert "tried" in others
    assert "MambaForCausalLM" not in result.stdout
    assert (result.returncode, result.stderr) == (0, "")


def test_the_way_of_one_model_is_told(folder: Path) -> None:
    assert quire("models", str(folder)).stdout == "OPTForCausalLM: a family of Quire's own\n"
    assert quire("models", "GraniteForCausalLM").stdout.startswith("GraniteForCausalLM: through transformers, if")
    assert quire("models", "phi3").stdout == "Phi3ForCausalLM: a family of Quire's own\n"
    assert "LlamaForCausalLM" in quire("models", "llama").stderr
    refused = quire("models", "MambaForCausalLM")
    assert refused.returncode == 2
    assert refused.stderr.startswith("quire: architecture MambaForCausalLM is not supported: in transf")
    assert quire("models", "owner/name").stderr.startswith(
        "quire: there is no folder or file owner/name; for a model that is elsewhere"
    )
    assert quire("models", "a", "b").stderr.startswith("quire: models takes one architecture, folder or file\n")


def test_pull_prints_the_folder(folder: Path) -> None:
    assert quire("pull", str(folder)).stdout == f"{folder}\n"
    assert quire("pull", QUIRE_MODEL=str(folder)).stdout == f"{folder}\n"


@pytest.mark.parametrize("command", ["serve", "pull"])
def test_a_model_that_cannot_be_served_is_refused_before_anything_starts(folder: Path, command: str) -> None:
    """The test repairs one error after the other."""
    with TemporaryDirectory() as place:
        broken = Path(place)

        def said() -> str:
            result = quire(command, place, *(["--port=0"] if command == "serve" else []))
            assert (result.returncode, result.stderr.count("\n")) == (2, 1)
            return result.stderr

        (broken / "config.json").write_text('{"architectures": ["NoSuchForCausalLM"]}')
        assert "architecture NoSuchForCausalLM is not supported; `quire models` lists" in said()
        shutil.copy(folder / "config.json", broken)
        assert "has no tokenizer" in said()
        shutil.copy(folder / "tokenizer.json", broken)
        (broken / "tokenizer_config.json").write_text('{"chat_template": "{% if %}"}')
        assert said().startswith(f"quire: {place}: the chat template is wrong in line 1: ")
        (broken / "tokenizer_config.json").unlink()
        assert "no weights; none of model.safetensors," in said()


def test_families_only_by_wish(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text('{"architectures": ["GraniteForCausalLM"]}')
    result = quire("serve", str(tmp_path), "--port=0", "--model-impl=quire")
    assert result.returncode == 2
    assert result.stderr.startswith(
        f"quire: {tmp_path}: --model-impl quire: no family of architecture GraniteForCausalLM (there are"
    )
    assert quire("serve", str(tmp_path), "--port=0").stderr.startswith(f"quire: {tmp_path} has no tokenizer")


def test_ctrl_c_in_the_first_moments_leaves_no_traceback(tmp_path: Path) -> None:
    cache = tmp_path / "gguf"
    name = model_folder(embedded_file(), tmp_path / "other", RECOMMENDED).name
    cache.mkdir()
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "QUIRE_CACHE": str(tmp_path)}
    with (cache / f".{name}.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)  # so that the command waits for the lock
        with subprocess.Popen(
            [sys.executable, "-m", "quire", "pull"], stderr=subprocess.PIPE, text=True, env=environment
        ) as process:
            while lock.name not in open_files(process.pid):
                assert process.poll() is None
                time.sleep(0.02)
            process.send_signal(signal.SIGINT)
            assert process.stderr is not None
            rest = process.stderr.read()
            assert process.wait() == 130
    assert "Traceback" not in rest
    assert [path.name for path in cache.iterdir()] == [f".{name}.lock"]


def open_files(pid: int) -> list[str]:
    result = []
    for entry in Path(f"/proc/{pid}/fd").iterdir():
        with suppress(FileNotFoundError):  # closed meanwhile
            result.append(os.readlink(entry))
    return result


def test_flags_win_over_environment_and_that_over_the_file(tmp_path: Path) -> None:
    file = tmp_path / "quire.yaml"
    file.write_text("port: 1\nmax-num-seqs: 2\nready-timeout: 3\n")
    result = settings.read({"config": str(file), "port": "11"}, {"QUIRE_PORT": "12", "QUIRE_MAX_NUM_SEQS": "13"})
    assert (result.gateway.port, result.scheduler.max_num_seqs, result.serve.ready_timeout) == (11, 13, 3.0)


def test_a_setting_that_nobody_has_is_refused_in_a_file(tmp_path: Path) -> None:
    file = tmp_path / "quire.yaml"
    for name in ("max-num-seq", "scheduler"):
        file.write_text(f"{name}: x\n")
        with pytest.raises(ConfigError, match="there is no setting"):
            settings.read({"config": str(file)}, {})


def test_services_get_all_settings_and_no_secret_on_their_command_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("QUIRE_MAX_NUM_SEQS", "99")  # which a flag has overruled
    flags = {"max_num_seqs": "128", "api_key": ["k3y-one", "k3y-two"], "dtype": "bfloat16", "port": "8123"}
    result = settings.read(flags, os.environ)
    expected = connect_services(result, 8123, tmp_path)
    processes = children(result, expected, tmp_path, ServiceLog(sys.stderr.buffer))
    configs = {"gateway": expected.gateways, "scheduler": expected.schedulers, "worker": expected.workers}
    assert [child.name for child in processes] == ["gateway", "worker", "scheduler"]
    for child in processes:
        (config,) = configs[child.name]
        argv = child.argv[child.argv.index(f"services.{child.name}") + 1 :]
        assert load(type(config), argv, child.environment, prog=child.name) == config
        assert "k3y" not in " ".join(child.argv)
        assert child.environment["HF_HUB_OFFLINE"] == "1"


def test_the_announcement_names_an_address_and_a_command(tmp_path: Path) -> None:
    (tmp_path / "tokenizer_config.json").write_text('{"chat_template": null}')
    config = GatewayConfig(model="owner/name", served_model_name=["it's"], port=8123)
    text = banner(config, tmp_path, 4.24)
    assert "(ready in 4.2 s, 3 ranks)" in banner(config, tmp_path, 4.24, 1, 3)
    assert "(ready in 4.2 s, 2 engines of 3 ranks)" in banner(config, tmp_path, 4.24, 2, 3)
    assert "Quire serves it's at http://localhost:8123 (ready in 4.2 s)" in text
    command = shlex.split(next(line for line in text.splitlines() if "curl" in line))
    assert command[:3] == ["curl", "-s", "http://localhost:8123/v1/completions"]
    assert '"model": "it\'s"' in command[-1]
    (tmp_path / "chat_template.jinja").write_text("")
    assert has_chat_template(config, tmp_path)
    assert "/v1/chat/completions" in banner(config, tmp_path, 4.24)


def test_the_announcement_shows_no_key(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    config = GatewayConfig(api_key=["secret", "other"])
    for variable in ("another", "secret,other"):  # neither is what the shell would put in
        monkeypatch.setenv("QUIRE_API_KEY", variable)
        assert "Bearer <your key>" in banner(config, tmp_path, 1.0)
    monkeypatch.setenv("QUIRE_API_KEY", "secret")
    assert "Bearer $QUIRE_API_KEY" in banner(config, tmp_path, 1.0)
    monkeypatch.delenv("QUIRE_API_KEY")
    assert "Bearer <your key>" in banner(config, tmp_path, 1.0)
    assert "secret" not in banner(config, tmp_path, 1.0)


@pytest.mark.parametrize(
    ("host", "url"), [("0.0.0.0", "http://localhost:1"), ("::1", "http://[::1]:1"), ("a", "http://a:1")]
)
def test_urls(host: str, url: str) -> None:
    assert base_url(host, 1) == url
