"""The programs of docs/clients.md, changed to talk to a server under test."""

import re
import runpy
import tempfile
from pathlib import Path

from tests.clients.conftest import Server
from tests.clients.conversation import KEY

PAGE = Path(__file__).parents[2] / "docs/clients.md"


def snippet(heading: str, server: Server, language: str = "python") -> str:
    """Return the program below a heading of the page, with the address, key and model name of `server`."""
    section = re.search(rf"^## {re.escape(heading)}\n(.*?)(?=^## |\Z)", PAGE.read_text(encoding="utf-8"), re.M | re.S)
    assert section is not None, heading
    code = re.search(rf"^```{language}\n(.*?)^```", section[1], re.M | re.S)
    assert code is not None, heading
    text = code[1]
    for shown, real in (("http://localhost:8000/v1", server.url), ('"none"', f'"{KEY}"'), ("my-model", server.model)):
        assert shown in text, f"{heading}: {shown}"
        text = text.replace(shown, real)
    return text


def run_snippet(heading: str, server: Server) -> None:
    """Run the Python program below a heading, from a file, since some clients look at the source of tools."""
    with tempfile.NamedTemporaryFile("w", suffix=".py") as file:
        file.write(snippet(heading, server))
        file.flush()
        runpy.run_path(file.name)
