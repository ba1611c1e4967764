"""`quire serve` with the embedded model, whose outputs keep to bad words, allowed tokens and a limit of their reasoning
while a process is killed.

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
from tests.exactness.chat_client import PATIENCE, replace
from tests.quire.quire_server import Server, serving
from tests.waiting import until

NAME = "smol"
TOPICS = ("the sea", "old trains", "bread", "mountains")
TOKENS = 48
REASONING = 20


class Output(Struct):
    """One streamed output so far, as the texts of its tokens."""

    tokens: list[str] = []
    finish: str | None = None

    @property
    def pairs(self) -> list[tuple[str, str]]:
        return list(zip(self.tokens, self.tokens[1:], strict=False))


@pytest.fixture(scope="module")
def tokenizer_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a folder with the model's tokenizer, in which two tokens that it does not need mark reasoning."""
    folder = tmp_path_factory.mktemp("tokenizer")
    for name in ("tokenizer.json", "tokenizer_config.json"):
        text = (locate("") / name).read_text()
        (folder / name).write_text(text.replace("<repo_name>", "<think>").replace("<file_sep>", "</think>"))
    return folder


@pytest.fixture(scope="module")
def tokenizer(tokenizer_folder: Path) -> Tokenizer:
    return Tokenizer.load(tokenizer_folder, locate(""))


@pytest.mark.parametrize("victim", ["worker", "scheduler"])
async def test_a_killed_process_is_a_pause(
    victim: str, tokenizer: Tokenizer, tokenizer_folder: Path, tmp_path: Path
) -> None:
    flags = f"--tokenizer={tokenizer_folder}", "--reasoning-parser=qwen3"
    with serving(locate(""), tmp_path, *flags, name=NAME) as server:
        url = f"{server.url}/v1"
        async with openai.AsyncOpenAI(base_url=url, api_key="-", max_retries=0, timeout=PATIENCE) as api:
            free = await write_all(api, {})
            bad = [two_words(output, tokenizer) for output in free]
            fields = {
                "bad_words": list(dict.fromkeys("".join(pair) for pair in bad)),
                "allowed_token_ids": without_letter("z", tokenizer),
                "thinking_token_budget": REASONING,
            }
            undisturbed = await write_all(api, fields)
            disturbed = await write_all(api, fields, server, victim)
    assert disturbed == undisturbed
    assert all(output.finish == "length" for output in disturbed)
    assert any(first in output.tokens for output in disturbed for first, _ in bad), "a word that is begun may come"
    for output in disturbed:
        assert len(output.tokens) == TOKENS
        assert not set(output.pairs) & set(bad)
        assert not any("z" in token.lower() for token in output.tokens)
        assert output.tokens.index("</think>") == REASONING


def two_words(output: Output, tokenizer: Tokenizer) -> tuple[str, str]:
    """Return two tokens of an output, one after the other, each a word with a space before it."""
    for first, second in output.pairs[8:]:
        if first.startswith(" ") and second.startswith(" ") and f"{first[1:]}{second[1:]}".isalpha():
            ids = [id for word in (first, second) for id in tokenizer.encode(word, add_special_tokens=False)]
            if ids in tokenize_bad_words([first + second], tokenizer):
                return first, second
    raise AssertionError(f"no two words in {output}")


def without_letter(letter: str, tokenizer: Tokenizer) -> list[int]:
    """Return the tokens whose text does not have a letter."""
    ids = [id for id in range(tokenizer.vocab_size) if letter not in tokenizer.token_text(id).lower()]
    assert 40_000 < len(ids) < tokenizer.vocab_size - 100
    return ids


async def write_all(
    api: openai.AsyncOpenAI, fields: Mapping[str, Any], killed: Server | None = None, victim: str = ""
) -> list[Output]:
    """Return two outputs about each topic, which are asked for at the same time; meanwhile a process may die."""
    outputs = [[Output(), Output()] for _ in TOPICS]
    async with asyncio.TaskGroup() as tasks:
        for index, topic in enumerate(TOPICS):
            tasks.create_task(write(api, index, topic, fields, outputs[index]))
        if killed is not None:
            await until(lambda: all(len(one.tokens) >= 5 for pair in outputs for one in pair), PATIENCE)
            assert any(one.finish is None for pair in outputs for one in pair)  # a client may be late
            await replace(killed, victim)
    return [one for pair in outputs for one in pair]


async def write(
    api: openai.AsyncOpenAI, seed: int, topic: str, fields: Mapping[str, Any], outputs: list[Output]
) -> None:
    chunks = await api.completions.create(
        model=NAME,
        prompt=f"<think>A few facts about {topic}, and the",
        max_tokens=TOKENS,
        n=len(outputs),
        seed=seed,
        temperature=0.9 * (seed % 2),
        presence_penalty=0.2,
        logprobs=0,
        stream=True,
        extra_body={"ignore_eos": True, **fields},
    )
    async for chunk in chunks:
        for choice in chunk.choices:
            output = outputs[choice.index]
            output.tokens += (choice.logprobs.tokens if choice.logprobs else None) or []
            output.finish = choice.finish_reason
