"""schemathesis asks a real server what its `/openapi.json` allows, and what it forbids.

No answer is a failure of the server, every one has the form that is described, and what is forbidden is refused. (What
is allowed may be refused: whether a prompt fits the context, for instance, is not for a schema to say.)
`QUIRE_TEST_EXAMPLES=1000` makes up so many requests to each route, instead of a few.
"""

import asyncio
import os
import re
import sys
from collections import Counter
from pathlib import Path

import aiohttp
import pytest

from tests.scripted_worker import Reply, Script
from tests.system.processes import server

EXAMPLES = os.environ.get("QUIRE_TEST_EXAMPLES", "10")
KEY = "secret"
GENERATING = ("/v1/chat/completions", "/v1/completions", "/v1/responses")
SETTINGS = """
[[operations]]
include-path = ["/health", "/ping"]
checks.not_a_server_error.expected-statuses = [200, 400, 405, 503]
"""
SCRIPT = Script(eos=1, replies=[Reply(prompt=[], tokens=[20, 21, 22])])  # to any prompt


async def num_answered(port: int) -> Counter[tuple[str, str]]:
    """Return the number of the gateway's answers by path and status."""
    async with aiohttp.ClientSession() as client, client.get(f"http://127.0.0.1:{port}/metrics") as response:
        text = await response.text()
    found = re.findall(r'^quire:http_responses_total\{code="(\d+)",handler="([^"]+)"\} (\S+)', text, re.MULTILINE)
    return Counter({(path, status): int(float(count)) for status, path, count in found})


@pytest.mark.timeout(7200)
async def test_the_server_is_as_described(tmp_path: Path) -> None:
    """No request ends a process, either."""
    async with server(SCRIPT, front=[f"--api-key={KEY}", "--enable-tokenizer-info-endpoint"]) as running:
        argv = [
            *("-m", "schemathesis.cli", "run", f"http://127.0.0.1:{running.port}/openapi.json"),
            *("--header", f"Authorization: Bearer {KEY}", "--phases", "coverage,fuzzing"),
            *("--seed", "1", "--max-examples", EXAMPLES, "--checks", "all"),
            *("--exclude-checks", "positive_data_acceptance", "--generation-database", "none", "--no-color"),
        ]
        (tmp_path / "schemathesis.toml").write_text(SETTINGS)
        process = await asyncio.create_subprocess_exec(
            sys.executable, *argv, cwd=tmp_path, stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.STDOUT
        )
        output = (await process.communicate())[0].decode()
        assert process.returncode == 0, output
        answered = await num_answered(running.port)
        assert all(answered[path, "200"] > 20 for path in GENERATING), answered  # not only refusals were compared
        assert all(answered[path, "400"] > 20 for path in GENERATING), answered
        parts = (running.engine.scheduler, running.engine.worker, running.gateway)
        assert [part.lives for part in parts] == [1, 1, 1], output
    assert re.search(r"\d+ passed|No issues found", output)
