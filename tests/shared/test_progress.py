"""Tests that progress is a bar on a terminal, and two lines in a log."""

import io

import pytest

from shared.hub.progress import TERMINAL_VARIABLE, progress


def test_a_log_gets_a_line_at_the_start_and_one_at_the_end(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv(TERMINAL_VARIABLE, raising=False)
    with progress("filling", 2000) as done:
        assert capsys.readouterr().err == "filling\n"
        done(1000)
        done(1000)
        assert capsys.readouterr().err == ""
    assert capsys.readouterr().err.startswith("filling: 2.00kB in ")


def test_a_terminal_gets_a_bar(monkeypatch: pytest.MonkeyPatch) -> None:
    class Terminal(io.StringIO):
        def isatty(self) -> bool:
            return True

    monkeypatch.delenv(TERMINAL_VARIABLE, raising=False)
    monkeypatch.setattr("sys.stderr", terminal := Terminal())
    with progress("filling", 2000) as done:
        done(2000)
    assert "\rfilling: 100%" in terminal.getvalue()


def test_what_is_copied_to_a_terminal_gets_a_bar_too(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(TERMINAL_VARIABLE, "1")
    with progress("filling", 2000) as done:
        done(2000)
    assert "\rfilling: 100%" in capsys.readouterr().err


def test_what_failed_is_not_said_to_be_done(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv(TERMINAL_VARIABLE, raising=False)
    with pytest.raises(OSError, match="full"), progress("filling", 2000):
        raise OSError("full")
    assert capsys.readouterr().err == "filling\n"
