"""`quire serve` with the embedded model, whose outputs keep to bad words and allowed tokens while a process is killed.

What is ruled out is a function of the output, so an output goes on as it would have without that.
"""

import asyncio
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import openai
import pytest
from msgspec import Struct

from shared.hub.checkpoint import locate
from shared.text.bad_words import tokenize_bad_words
from shared.text.tokenizer import Tokenizer
from tests.exactness.chat_client import PATIENCE, status_is
from tests.quire.quire_server import Server, serving
from tests.waiting import until

NAME = "smol"
TOPICS = ("the sea", "old trains", "bread", "mountains")
TOKENS = 48

pytestmark = pytest.mark.timeout(300)


class Text(Struct):
    """One streamed output so far."""

    text: str = ""
    chunks: int = 0
    finish: str | None = None


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return Tokenizer.load(locate(""))


@pytest.mark.parametrize("victim", ["worker", "scheduler"])
async def test_a_killed_process_is_a_pause(victim: str, tokenizer: Tokenizer, tmp_path: Path) -> None:
    with serving(locate(""), tmp_path, name=NAME) as server:
        url = f"{server.url}/v1"
        async with openai.AsyncOpenAI(base_url=url, api_key="-", max_retries=0, timeout=PATIENCE) as api:
            free = await write_all(api, {})
            phrases = common_phrases([one.text for one in free], tokenizer)
            fields = {"bad_words": phrases, "allowed_token_ids": without_letter("z", tokenizer)}
            undisturbed = await write_all(api, fields)
            disturbed = await write_all(api, fields, server, victim)
    assert [one.text for one in disturbed] == [one.text for one in undisturbed]
    assert all(one.finish == "length" for one in disturbed)
    assert [one.text for one in undisturbed] != [one.text for one in free]
    for phrase in phrases:
        assert any(phrase in one.text for one in free)
        assert not any(phrase in one.text for one in disturbed)


def common_phrases(texts: list[str], tokenizer: Tokenizer) -> list[str]:
    """Return two words that follow each other in each of the texts, with the spaces before both, as whole tokens."""
    phrases = []
    for text in texts:
        ids = tokenizer.encode(text, add_special_tokens=False)
        words = [tokenizer.decode([id]) for id in ids]
        pairs = zip(ids[8:], ids[9:], words[8:], words[9:], strict=False)
        for first, second, one, other in pairs:
            if one.startswith(" ") and other.startswith(" ") and (one + other).replace(" ", "").isalpha():
                phrase = one + other
                if [first, second] in tokenize_bad_words([phrase], tokenizer):
                    phrases.append(phrase)
                    break
    assert len(phrases) == len(texts)
    return list(dict.fromkeys(phrases))


def without_letter(letter: str, tokenizer: Tokenizer) -> list[int]:
    """Return the tokens whose text does not have a letter."""
    ids = [id for id in range(tokenizer.vocab_size) if letter not in tokenizer.token_text(id).lower()]
    assert 40_000 < len(ids) < tokenizer.vocab_size - 100
    return ids


async def write_all(
    api: openai.AsyncOpenAI, fields: Mapping[str, Any], killed: Server | None = None, victim: str = ""
) -> list[Text]:
    """Return two texts about each topic, which are asked for at the same time; meanwhile a process may die."""
    texts = [[Text(), Text()] for _ in TOPICS]
    async with asyncio.TaskGroup() as tasks:
        for index, topic in enumerate(TOPICS):
            tasks.create_task(write(api, index, topic, fields, texts[index]))
        if killed is not None:
            await until(lambda: all(one.chunks >= 5 for pair in texts for one in pair), PATIENCE)
            assert all(one.finish is None for pair in texts for one in pair)
            killed.children()[victim].kill()
            await until(lambda: status_is(killed, 503), PATIENCE)
    return [one for pair in texts for one in pair]


async def write(api: openai.AsyncOpenAI, seed: int, topic: str, fields: Mapping[str, Any], texts: list[Text]) -> None:
    chunks = await api.completions.create(
        model=NAME,
        prompt=f"A few facts about {topic}, and the",
        max_tokens=TOKENS,
        n=len(texts),
        seed=seed,
        temperature=0.9 * (seed % 2),
        presence_penalty=0.2,
        stream=True,
        extra_body={"ignore_eos": True, **fields},
    )
    async for chunk in chunks:
        for choice in chunk.choices:
            one = texts[choice.index]
            one.text += choice.text
            one.chunks += 1
            one.finish = choice.finish_reason
