"""Vercel's AI SDK, with its provider for APIs like OpenAI's and the one for OpenAI's own. It runs under Node."""

import json
import os
import subprocess
from typing import Any

import pytest

from tests.clients.conftest import ROOT, Server
from tests.clients.conversation import (
    ANSWER,
    KEY,
    QUESTION,
    RESULT,
    THOUGHT,
    TOO_LONG,
    TRIP,
    TRIP_QUESTION,
    TWO_QUESTIONS,
    Trip,
)
from tests.clients.snippets import snippet

PACKAGES = ROOT / ".clients/node"
"""Where `make test-clients` installs the packages if there is npm."""

PROGRAM = (ROOT / "tests/clients/ai_sdk/client.mjs").read_text(encoding="utf-8")

pytestmark = pytest.mark.skipif(not PACKAGES.exists(), reason="there is no npm")
PROVIDERS = pytest.mark.parametrize("provider", ["compatible", "openai", "responses"])


def run(server: Server, *arguments: str, key: str = KEY) -> Any:
    """Run an action of the program, and return its result."""
    variables = {"SERVER_URL": server.url, "SERVER_MODEL": server.model, "SERVER_KEY": key, "RESULT": RESULT}
    return json.loads(run_node(PROGRAM, *arguments, **variables))


def run_node(program: str, *arguments: str, **variables: str) -> str:
    """Run a program where it finds the packages, and return what it prints."""
    command = ["node", "--input-type=module", "--eval", program, "--", *arguments]
    environment = os.environ | variables
    process = subprocess.run(command, cwd=PACKAGES, env=environment, capture_output=True, text=True, timeout=100)
    assert process.returncode == 0, process.stderr
    return process.stdout


@PROVIDERS
@pytest.mark.parametrize(("question", "cities"), [(QUESTION, ["Paris"]), (TWO_QUESTIONS, ["Paris", "Oslo"])])
def test_a_loop_of_tool_calls(scripted: Server, provider: str, question: str, cities: list[str]) -> None:
    result = run(scripted, "loop", provider, question)
    assert (result["text"], result["cities"]) == (ANSWER, cities)
    assert result["steps"] == ["tool-calls", "stop"]


def test_reasoning(scripted: Server) -> None:
    """OpenAI's own provider does not look for it."""
    thoughts = run(scripted, "loop", "compatible", QUESTION)["thoughts"]
    assert [thought.strip() for thought in thoughts] == [THOUGHT]


@PROVIDERS
def test_a_streamed_loop_of_tool_calls(scripted: Server, provider: str) -> None:
    result = run(scripted, "streamLoop", provider, QUESTION)
    assert ("".join(result["pieces"]), result["cities"]) == (ANSWER, ["Paris"])
    assert len(result["pieces"]) > 3
    assert result["usage"]["outputTokens"] > 0


@PROVIDERS
@pytest.mark.parametrize("action", ["object", "output"])
def test_a_typed_answer(embedded: Server, provider: str, action: str) -> None:
    assert Trip.model_validate(run(embedded, action, provider, TRIP_QUESTION)["object"])


@PROVIDERS
def test_a_streamed_typed_answer(embedded: Server, provider: str) -> None:
    result = run(embedded, "streamObject", provider, TRIP_QUESTION)
    assert Trip.model_validate(result["object"])
    assert len(result["partial"]) > 3


@PROVIDERS
def test_a_demanded_call(embedded: Server, provider: str) -> None:
    result = run(embedded, "demandedCall", provider, TRIP_QUESTION)
    assert result["finishReason"] == "tool-calls"
    assert all(Trip.model_validate(call["input"]) for call in result["calls"])
    assert {call["name"] for call in result["calls"]} == {"book"}


@PROVIDERS
def test_errors(embedded: Server, provider: str) -> None:
    unknown = run(embedded, "error", provider, QUESTION, "gpt-5")
    assert (unknown["isCallError"], unknown["status"]) == (True, 404)
    for action in ("error", "streamError"):
        too_long = run(embedded, action, provider, TOO_LONG)
        assert too_long["status"] == 400
        assert "maximum context length is" in too_long["message"]
    assert run(embedded, "error", provider, QUESTION, key="wrong")["status"] == 401


def test_the_documentation(scripted: Server) -> None:
    program = snippet("Vercel's AI SDK", scripted, "js")
    assert run_node(program) == f"{ANSWER}\n{TRIP.model_dump_json()}\n"
