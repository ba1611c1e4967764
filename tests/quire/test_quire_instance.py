"""Tests the private folder of an instance: nobody else can enter it, and only those of dead instances are removed."""

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from quire.instance_folder import PREFIX, instance_folder, remove_stale
from shared.errors import ConfigError

HOLD = "import sys, time; from pathlib import Path; from quire.instance_folder import instance_folder\n"
HOLD += "with instance_folder(Path(sys.argv[1])) as folder: print(folder, flush=True); time.sleep(60)"


def hold(place: Path) -> tuple["subprocess.Popen[str]", Path]:
    """Run another process that holds an instance folder in `place`."""
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    process = subprocess.Popen(
        [sys.executable, "-c", HOLD, str(place)], stdout=subprocess.PIPE, text=True, env=environment
    )
    assert process.stdout is not None
    return process, Path(process.stdout.readline().strip())


def end(process: "subprocess.Popen[str]") -> None:
    process.send_signal(signal.SIGKILL)
    process.communicate()


def test_the_folder_is_private_and_goes_with_the_server(tmp_path: Path) -> None:
    with instance_folder(tmp_path) as folder:
        assert folder.stat().st_mode & 0o777 == 0o700
        (folder / "gateways.sock").touch()
    assert list(tmp_path.iterdir()) == []


def test_it_goes_when_the_start_fails(tmp_path: Path) -> None:
    with pytest.raises(RuntimeError), instance_folder(tmp_path):
        raise RuntimeError
    assert list(tmp_path.iterdir()) == []


def test_kills_in_a_row_leave_no_more_than_the_last(tmp_path: Path) -> None:
    """PRC-04."""
    for _ in range(3):
        process, folder = hold(tmp_path)
        (folder / "gateways.sock").touch()
        end(process)
        assert [path.name for path in tmp_path.iterdir()] == [folder.name]
    with instance_folder(tmp_path) as own:
        assert list(tmp_path.iterdir()) == [own]


def test_a_living_servers_folder_is_not_touched(tmp_path: Path) -> None:
    """PRC-04."""
    process, theirs = hold(tmp_path)
    try:
        (theirs / "gateways.sock").touch()
        with instance_folder(tmp_path) as own:
            assert {own, theirs} == set(tmp_path.iterdir())
        assert (theirs / "gateways.sock").exists()
    finally:
        end(process)


def test_only_folders_of_ours_are_removed(tmp_path: Path) -> None:
    """PRC-04."""
    (tmp_path / f"{PREFIX}.12.abc").mkdir()
    (tmp_path / f"{PREFIX}.notes").mkdir()
    (tmp_path / "other").mkdir()
    (tmp_path / f"{PREFIX}.13.abc").symlink_to(tmp_path / "other")
    assert remove_stale(tmp_path) == [tmp_path / f"{PREFIX}.12.abc"]
    assert (tmp_path / "other").is_dir()
    assert (tmp_path / f"{PREFIX}.notes").is_dir()


def test_a_path_too_long_for_sockets_is_passed_over(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    long = tmp_path / ("x" * 100)
    long.mkdir()
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(long))
    with instance_folder() as folder:
        assert folder.parent != long
        assert len(str(folder)) < 100


def test_no_place_at_all_is_a_clear_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "access", lambda path, mode: False)
    with pytest.raises(ConfigError, match="no writable folder"), instance_folder():
        pass
