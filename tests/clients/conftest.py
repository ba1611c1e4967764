"""Starts the servers for the clients. These tests run in environments that have the clients, and nothing of Quire's."""

import json
import os
import subprocess
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path
from typing import NamedTuple

import pytest

ROOT = Path(__file__).parents[2]
SERVER_PYTHON = ROOT / ".venv/bin/python"

NEEDS = {
    "test_clients_agents.py": "agents",
    "test_clients_ai_sdk.py": "agents",  # runs under Node, so once is enough
    "test_clients_instructor.py": "instructor",
    "test_clients_langchain.py": "langchain",
    "test_clients_litellm.py": "litellm",
    "test_clients_llama_index.py": "llama_index",
    "test_clients_pydantic_ai.py": "pydantic_ai",
    "test_clients_smolagents.py": "smolagents",
}
"""The package that a file tests. Not all of them can be installed together."""

collect_ignore = [file for file, package in NEEDS.items() if find_spec(package) is None]


class Server(NamedTuple):
    """A server's address for clients, and the name of its model."""

    url: str
    model: str


@pytest.fixture(scope="session")
def servers() -> Iterator[dict[str, str]]:
    """Yield the URLs of running servers."""
    command = [SERVER_PYTHON, "-m", "tests.clients.servers"]
    environment = os.environ | {"PYTHONPATH": str(ROOT)}
    with subprocess.Popen(
        command, cwd=ROOT, env=environment, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as process:
        assert process.stdout is not None
        line = process.stdout.readline()
        assert line, "the servers do not start; their output is above"
        yield json.loads(line)
        process.communicate(timeout=60)  # ends their input, and with it the servers
    assert process.returncode == 0


@pytest.fixture
def embedded(servers: dict[str, str]) -> Server:
    """Return the server with the embedded model, which knows little and does what grammars demand."""
    return Server(servers["embedded"], "smol")


@pytest.fixture
def scripted(servers: dict[str, str]) -> Server:
    """Return the server with the scripted model, which answers the questions of `conversation.py`."""
    return Server(servers["scripted"], "tiny")
