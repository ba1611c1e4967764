"""Tests demands on the form of an output on a real server: none ends a process, or is an error of the server's own."""

import json
import urllib.request
from pathlib import Path
from typing import Any
from urllib.error import HTTPError

from hypothesis import given, settings

from tests.quire.quire_server import serving
from tests.text.demands import demands


def ask(url: str, fields: dict[str, Any]) -> tuple[int, Any]:
    """Return the status of a completion, and its body."""
    body = {"model": "tiny", "prompt": "The quick", "max_tokens": 12, "n": 2, "temperature": 1.5} | fields
    headers = {"Content-Type": "application/json"}
    request = urllib.request.Request(f"{url}/v1/completions", json.dumps(body).encode(), headers)
    try:
        with urllib.request.urlopen(request, timeout=60) as response:
            return response.status, json.load(response)
    except HTTPError as error:
        return error.code, json.load(error)


def test_no_demand_ends_a_process(folder: Path, tmp_path: Path) -> None:
    statuses: list[int] = []
    with serving(folder, tmp_path) as server:
        url = server.url
        before = server.children()

        @settings(deadline=None, max_examples=100)
        @given(fields=demands)
        def check(fields: dict[str, Any]) -> None:
            status, body = ask(url, fields)
            statuses.append(status)
            assert status in (200, 400), body

        check()
        assert server.children() == before, "the same processes"
        (one, *_) = ask(url, {"guided_choice": ["yes", "no"]})[1]["choices"]
        assert one["text"] in ("yes", "no")
    assert {200, 400} <= set(statuses)
    assert "Traceback" not in server.err.read_text()
