"""Runs the servers that the clients talk to, until the standard input ends: `python -m tests.clients.servers`.

One serves the embedded model, which grammars make call tools and answer in a form. The other serves a scripted model,
which calls tools of its own accord and answers by their results. Both write calls as Hermes does. When both are ready,
a line of JSON names their URLs.

Clients need packages of their own, so their tests run in another environment than this module does.
"""

import asyncio
import json
import sys
import tempfile
from functools import partial
from pathlib import Path

from shared.hub.checkpoint import locate
from tests.clients.conversation import (
    ANSWER,
    FATAL,
    FINAL_RESULT,
    KEY,
    QUESTION,
    RESULT,
    THOUGHT,
    TRIP,
    TRIP_QUESTION,
    TWO_QUESTIONS,
)
from tests.gateway.fakes import ids, write_template
from tests.quire.quire_server import healthy, serving
from tests.scripted_worker import Reply, ScriptedFailure
from tests.system.http_client import talk
from tests.system.processes import server
from tests.text.tool_outputs import WRITERS, Call
from tests.text.tool_templates import TEMPLATES
from tests.waiting import until

FATAL_TOKEN = ids("<s>")[0]
assert FATAL_TOKEN in ids(FATAL)

calls = WRITERS["hermes"]


def replies() -> list[Reply]:
    """Return what the scripted model says to prompts that contain a text; the first that fits is said."""
    trip = TRIP.model_dump()
    said = {
        RESULT: ANSWER,
        FINAL_RESULT: calls([Call("final_answer", {"answer": ANSWER})]),
        '"name": "final_result"': calls([Call("final_result", trip)]),  # pydantic-ai's tool for a typed answer
        '"name": "Trip"': calls([Call("Trip", trip)]),  # the same of LangChain and instructor
        TRIP_QUESTION: TRIP.model_dump_json(),
        TWO_QUESTIONS: calls([Call("get_weather", {"city": "Paris"}), Call("get_weather", {"city": "Oslo"})]),
        QUESTION: f"<think>\n{THOUGHT}\n</think>\n\n" + calls([Call("get_weather", {"city": "Paris"})]),
    }
    return [Reply(ids(part), ids(text)) for part, text in said.items()]


async def main() -> None:
    """Run both servers."""
    with tempfile.TemporaryDirectory() as name:
        template = write_template(Path(name), TEMPLATES["hermes"])
        flags = [f"--chat-template={template}", "--tool-call-parser=hermes", f"--api-key={KEY}", "--strict-fields"]
        failures = [ScriptedFailure(FATAL_TOKEN, "raise")]
        script = talk(replies=replies(), failures=failures, max_positions=32768, blocks=4096)
        with serving(locate(""), Path(name) / "real", *flags, "--max-model-len=2048", name="smol") as real:
            async with server(script, front=[*flags, "--reasoning-parser=qwen3"]) as scripted:
                await until(partial(healthy, real.url), 120)
                urls = {"embedded": f"{real.url}/v1", "scripted": f"http://127.0.0.1:{scripted.port}/v1"}
                print(json.dumps(urls), flush=True)
                await asyncio.to_thread(sys.stdin.read)


if __name__ == "__main__":
    asyncio.run(main())
