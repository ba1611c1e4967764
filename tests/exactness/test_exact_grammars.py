"""`quire serve` with the embedded model, whose outputs follow a JSON schema while its worker or scheduler is killed.

An output ends as it would have without that, and is what the schema demands.
"""

import asyncio
import json
from pathlib import Path
from typing import Any

import openai
import pytest

from shared.hub.checkpoint import locate
from tests.exactness.chat_client import PATIENCE, replace
from tests.quire.quire_server import Server, serving
from tests.waiting import until

NAME = "smol"
SCHEMA: dict[str, Any] = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 20},
        "age": {"type": "integer", "minimum": 1, "maximum": 99},
        "kind": {"enum": ["cat", "dog"]},
        "words": {"type": "array", "items": {"type": "string", "maxLength": 9}, "minItems": 4, "maxItems": 4},
    },
    "required": ["name", "age", "kind", "words"],
    "additionalProperties": False,
}
ANIMALS = ("an owl", "a horse", "a whale", "a spider", "a fox", "a tortoise")


class Pet:
    """One streamed answer so far."""

    def __init__(self) -> None:
        self.text = ""
        self.chunks = 0
        self.finish: str | None = None


@pytest.mark.parametrize("victim", ["worker", "scheduler"])
async def test_a_killed_process_is_a_pause(victim: str, tmp_path: Path) -> None:
    with serving(locate(""), tmp_path, name=NAME) as server:
        url = f"{server.url}/v1"
        async with openai.AsyncOpenAI(base_url=url, api_key="-", max_retries=0, timeout=PATIENCE) as api:
            undisturbed = await describe_all(api)
            disturbed = await describe_all(api, server, victim)
    assert [pet.text for pet in disturbed] == [pet.text for pet in undisturbed]
    for pet in disturbed:
        assert pet.finish == "stop"
        check(json.loads(pet.text))


def check(pet: Any) -> None:
    """Fail unless `pet` is what the schema demands."""
    assert list(pet) == ["name", "age", "kind", "words"]
    assert isinstance(pet["name"], str)
    assert len(pet["name"]) <= 20
    assert isinstance(pet["age"], int)
    assert 1 <= pet["age"] <= 99
    assert pet["kind"] in ("cat", "dog")
    assert len(pet["words"]) == 4
    assert all(isinstance(word, str) and len(word) <= 9 for word in pet["words"])


async def describe_all(api: openai.AsyncOpenAI, killed: Server | None = None, victim: str = "") -> list[Pet]:
    """Return two answers for each animal, which are asked for at the same time; meanwhile a process may die."""
    pets = [[Pet(), Pet()] for _ in ANIMALS]
    async with asyncio.TaskGroup() as tasks:
        for index, animal in enumerate(ANIMALS):
            tasks.create_task(describe(api, index, animal, pets[index]))
        if killed is not None:
            await until(lambda: all(pet.chunks >= 5 for pair in pets for pet in pair), PATIENCE)
            assert any(pet.finish is None for pair in pets for pet in pair)  # a client may be late
            await replace(killed, victim)
    return [pet for pair in pets for pet in pair]


async def describe(api: openai.AsyncOpenAI, seed: int, animal: str, pets: list[Pet]) -> None:
    chunks = await api.chat.completions.create(
        model=NAME,
        messages=[{"role": "user", "content": f"Describe {animal} as a pet, in JSON."}],
        response_format={"type": "json_schema", "json_schema": {"name": "pet", "schema": SCHEMA, "strict": True}},
        n=len(pets),
        seed=seed,
        temperature=0.9 * (seed % 2),
        stream=True,
    )
    async for chunk in chunks:
        for choice in chunk.choices:
            pet = pets[choice.index]
            pet.text += choice.delta.content or ""
            pet.chunks += 1
            pet.finish = choice.finish_reason
