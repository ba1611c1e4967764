"""Tests the making and the reading of keys."""

import os
import shutil
import stat
import threading
from collections.abc import Callable
from pathlib import Path

import pytest

from shared import curve
from shared.curve import ROLES, load_connection_keys, load_listener_keys, make_keys
from shared.errors import ConfigError
from tests.waiting import wait_until


def files(folder: Path) -> dict[str, bytes]:
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def test_each_folder_has_what_its_process_needs_and_only_its_owner_can_read_it(tmp_path: Path) -> None:
    made = make_keys(tmp_path)
    assert sorted(str(path.relative_to(tmp_path)) for path in made) == sorted(files(tmp_path))
    for role in ROLES:
        keys, listener = load_connection_keys(str(tmp_path), role), load_listener_keys(str(tmp_path))
        assert keys is not None
        assert listener is not None
        assert keys.scheduler == listener.public
        assert listener.admitted[role] == {keys.public}
        own = files(tmp_path / role)
        assert set(own) == {f"{role}.key", f"{role}.key_secret", "scheduler.key"}
        assert listener.secret not in b"".join(own.values())
        assert keys.secret not in b"".join(files(tmp_path / "scheduler").values())
    for path in tmp_path.rglob("*"):
        assert not path.stat().st_mode & (stat.S_IRWXG | stat.S_IRWXO), path
    assert os.umask(0o022) == 0o022, "the process's own mask is as before"


def test_keys_that_exist_are_kept_and_missing_ones_are_made(tmp_path: Path) -> None:
    make_keys(tmp_path)
    before = files(tmp_path)
    assert make_keys(tmp_path) == []
    for name in before:  # as if the making had been interrupted before this file
        if name.endswith("_secret"):
            continue
        content = (tmp_path / name).read_bytes()
        if name.count("/") == 1 and not name.endswith("/scheduler.key"):
            continue  # a pair's own public half, which is written before its secret one
        if name == "scheduler/scheduler.key":
            continue
        (tmp_path / name).unlink()
        assert [str(path.relative_to(tmp_path)) for path in make_keys(tmp_path)] == [name]
        assert (tmp_path / name).read_bytes() == content
    assert files(tmp_path) == before


def test_a_new_pair_is_admitted_beside_the_old_one(tmp_path: Path) -> None:
    make_keys(tmp_path)
    old = load_connection_keys(str(tmp_path), "gateway")
    (tmp_path / "gateway/gateway.key_secret").unlink()
    make_keys(tmp_path)
    new, listener = load_connection_keys(str(tmp_path), "gateway"), load_listener_keys(str(tmp_path))
    assert old is not None
    assert new is not None
    assert listener is not None
    assert old.public != new.public
    assert listener.admitted["gateway"] == {old.public, new.public}
    assert old.scheduler == new.scheduler == listener.public


def test_a_new_key_of_the_scheduler_reaches_the_roles_folders(tmp_path: Path) -> None:
    make_keys(tmp_path)
    old = load_connection_keys(str(tmp_path), "worker")
    (tmp_path / "scheduler/scheduler.key_secret").unlink()
    make_keys(tmp_path)
    new, listener = load_connection_keys(str(tmp_path), "worker"), load_listener_keys(str(tmp_path))
    assert old is not None
    assert new is not None
    assert listener is not None
    assert new.scheduler == listener.public != old.scheduler
    assert listener.admitted["worker"] == {new.public} == {old.public}


def test_no_folder_means_no_keys() -> None:
    assert load_listener_keys("") is None
    assert load_connection_keys("", "worker") is None


def replace(path: str, content: bytes) -> Callable[[Path], None]:
    return lambda folder: (folder / path).write_bytes(content) and None


DAMAGES = [
    ("scheduler", replace("scheduler/scheduler.key_secret", b"nonsense"), "scheduler.key_secret has no key"),
    ("worker", replace("worker/worker.key_secret", b'secret-key = "x"'), "worker.key_secret has no key"),
    ("worker", replace("worker/scheduler.key", b'public-key = "short"'), "has something that is not a key"),
    ("worker", replace("worker/scheduler.key", b'public-key = "' + "é".encode() * 20 + b'"'), "not a key"),
    ("worker", replace("worker/scheduler.key", b'public-key = "' + b"#" * 40 + b'"'), "not a key"),
    ("scheduler", replace("scheduler/gateways/other.key", b""), "gateways/other.key has no key"),
    ("scheduler", lambda folder: shutil.rmtree(folder / "scheduler/workers"), "there is no"),
    ("gateway", lambda folder: (folder / "gateway/gateway.key_secret").unlink(), "there is no"),
    ("gateway", lambda folder: shutil.rmtree(folder / "gateway"), "there is no"),
    (
        "gateway",
        lambda folder: shutil.copy(folder / "gateway/scheduler.key", folder / "gateway/gateway.key_secret"),
        "gateway.key_secret is not a pair of keys",
    ),
]


@pytest.mark.parametrize(("role", "damage", "message"), DAMAGES)
def test_wrong_keys_are_errors_that_name_the_flag_and_the_file(
    role: str, damage: Callable[[Path], object], message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    make_keys(tmp_path)
    damage(tmp_path)
    monkeypatch.setattr(curve, "WAIT", 0.2)
    with pytest.raises(ConfigError, match=message) as raised:
        load_listener_keys(str(tmp_path)) if role == "scheduler" else load_connection_keys(str(tmp_path), role)
    assert str(raised.value).startswith(f"--zmq-keys {tmp_path}: ")
    assert "\n" not in str(raised.value)
    assert str(tmp_path / role) in str(raised.value).removeprefix(f"--zmq-keys {tmp_path}: ")


def test_a_service_waits_for_keys_that_are_being_made(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("INFO")
    (tmp_path / "scheduler").mkdir()

    def make_later() -> None:
        wait_until(lambda: "waiting up to 30 s for keys in" in caplog.text)
        make_keys(tmp_path)

    thread = threading.Thread(target=make_later)
    thread.start()
    assert load_listener_keys(str(tmp_path)) is not None
    thread.join()
    assert caplog.text.count("waiting up to 30 s for keys in") == 1


def test_a_folder_that_cannot_be_written_is_an_error(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(ConfigError, match=r"cannot make keys in .*: Not a directory"):
        make_keys(tmp_path / "file")
