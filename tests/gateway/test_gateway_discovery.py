"""Tests where a gateway finds the addresses of its engines, without engines."""

import logging
from pathlib import Path

import pytest

from services.gateway.engine_discovery import Discovery, changes, parse_lines, tcp_addresses
from shared.errors import ConfigError


def test_changes_are_what_is_added_and_what_is_removed_each_once() -> None:
    assert changes([], ["a", "b", "a"]) == (["a", "b"], [])
    assert changes(["a", "b"], ["c", "b"]) == (["c"], ["a"])
    assert changes(["a", "b"], ["b", "a"]) == ([], [])
    assert changes(["a", "b"], []) == ([], ["a", "b"])


def test_a_file_has_one_address_a_line() -> None:
    text = "# engines\n\n  tcp://a:1  # the first\nipc:///tmp/b.sock\r\ntcp://e:5"
    assert parse_lines(text) == ["tcp://a:1", "ipc:///tmp/b.sock", "tcp://e:5"]
    with pytest.raises(ConfigError, match="http://d:1: must begin with"):
        parse_lines("tcp://a:1\nhttp://d:1")


def test_the_addresses_of_a_name_are_in_order_and_of_one_family() -> None:
    assert tcp_addresses(["10.0.0.10", "10.0.0.9", "::1", "10.0.0.9"], 7) == ["tcp://10.0.0.9:7", "tcp://10.0.0.10:7"]
    assert tcp_addresses(["fd00::2", "fd00::1"], 7) == ["tcp://[fd00::1]:7", "tcp://[fd00::2]:7"]
    assert tcp_addresses([], 7) == []


@pytest.mark.parametrize(
    ("entry", "message"),
    [
        ("dns://engines", "dns://engines: must be dns://name:port"),
        ("dns://:5557", "must be dns://name:port"),
        ("dns://engines:65536", "must be dns://name:port"),
        ("file://engines.txt", "file://engines.txt: must be file:// and an absolute path"),
        ("dns://two engines:5557", "must be tcp://host:port"),
        ("tcp://two engines:5557", "must be tcp://host:port"),
        ("http://engines:5557", "must begin with ipc://, tcp://, dns:// or file://"),
    ],
)
def test_an_invalid_entry_is_refused(entry: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        Discovery([entry])


async def test_names_and_files_are_read_anew_and_addresses_stay(tmp_path: Path) -> None:
    file = tmp_path / "engines"
    discovery = Discovery(["ipc:///a.sock", f"file://{file}", "dns://localhost:5557", "ipc:///a.sock"])
    assert discovery.may_change
    assert discovery.addresses == ["ipc:///a.sock"]
    file.write_text("tcp://b:1\n")
    assert await discovery.find() == ["ipc:///a.sock", "tcp://b:1", "tcp://127.0.0.1:5557"]
    file.write_text("tcp://c:1\n")
    assert await discovery.find() == ["ipc:///a.sock", "tcp://c:1", "tcp://127.0.0.1:5557"]
    assert not Discovery(["ipc:///a.sock"]).may_change


@pytest.mark.parametrize("entry", ["tcp://engines:5557", "dns://engines:5557", "tcp://10.0.0.1:5557"])
def test_other_hosts_need_protection(entry: str) -> None:
    with pytest.raises(ConfigError, match="needs --zmq-keys, or --insecure"):
        Discovery([entry], protected=False)
    Discovery([entry], protected=True)


async def test_an_address_of_another_host_in_a_file_needs_protection(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    file = tmp_path / "engines"
    discovery = Discovery([f"file://{file}", "dns://localhost:5557"], protected=False)
    file.write_text("tcp://127.0.0.1:1\n")
    assert await discovery.find() == ["tcp://127.0.0.1:1", "tcp://127.0.0.1:5557"]
    file.write_text("tcp://10.0.0.1:1\n")
    assert await discovery.find() == ["tcp://127.0.0.1:1", "tcp://127.0.0.1:5557"]
    assert "needs --zmq-keys, or --insecure" in caplog.text


async def test_a_look_that_fails_changes_nothing_and_is_said_once(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    file = tmp_path / "engines"
    discovery = Discovery([f"file://{file}", "dns://no-such-name.invalid:5557"])
    assert await discovery.find() == []
    file.write_text("tcp://b:1\n")
    assert await discovery.find() == ["tcp://b:1"]
    for spoil in (
        file.unlink,
        lambda: file.write_bytes(b"\xff"),
        lambda: file.write_text("tcp://c:1\ntcp://d"),
        lambda: file.write_text(""),  # it is being written
    ):
        spoil()
        assert await discovery.find() == ["tcp://b:1"]
        assert await discovery.find() == ["tcp://b:1"]
    file.write_text("# none\n")
    assert await discovery.find() == []
    said = [record.getMessage() for record in caplog.records]
    assert len([line for line in said if "no-such-name" in line]) == 1
    lines = [line.removeprefix(f"file://{file}") for line in said if "no-such-name" not in line]
    assert len(lines) == 7
    assert lines[5] == ": the file is empty; its 1 known engines stay"
    assert lines[1] == lines[6] == " can be read again"
    assert lines[4] == ": tcp://d: must be tcp://host:port; its 1 known engines stay"
    assert lines[2].endswith("No such file or directory: '" + str(file) + "'; its 1 known engines stay")
