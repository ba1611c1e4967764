"""`quire serve` with the embedded model, whose worker is killed under sixteen streams: for their clients, a pause.

What a client gets is put back into token ids (the API tells each token's bytes), so that the streams can be compared
with undisturbed ones: tokens and log-probabilities, to the last bit.
"""

import asyncio
from collections.abc import AsyncIterator, Iterator, Sequence
from typing import Any

import openai
import pytest
from msgspec import Struct
from openai.types.chat.chat_completion_chunk import ChatCompletionChunk
from openai.types.chat.chat_completion_token_logprob import ChatCompletionTokenLogprob

from shared.hub.checkpoint import locate
from shared.params import MAX_LOGPROBS
from shared.protocol import Sampling, TokenLogprobs
from shared.text.tokenizer import Tokenizer
from tests.exactness.equality import assert_alike
from tests.exactness.margin_rule import Run
from tests.quire.quire_server import Server, health, serving
from tests.waiting import until

NAME = "smol"
PATIENCE = 90.0  # seconds; reached only by tests that fail

pytestmark = pytest.mark.timeout(300)

WAYS: tuple[dict[str, Any], ...] = (
    {"temperature": 0.8, "top_k": 12, "top_p": 1.0},
    {"temperature": 0.7, "top_k": 0, "top_p": 0.4},
    {"temperature": 1.3, "top_k": 18, "top_p": 0.9},
    {"temperature": 0.2, "top_k": 0, "top_p": 1.0},
)
SUBJECTS = (
    "the sea", "bread", "a lighthouse", "winter", "clocks", "owls", "the moon", "rivers", "a long walk", "glass",
    "old maps", "trains", "the colour blue", "salt", "echoes", "a garden",
)  # fmt: skip


class Question(Struct):
    """A question of one client, and the sampling parameters of its answer."""

    text: str
    sampling: Sampling


class Answer(Struct):
    """The output that one client has received so far."""

    run: Run
    text: str = ""
    finish: str | None = None
    completion_tokens: int = 0


def questions() -> list[Question]:
    """Return questions, half of them greedy, with answers of 16 to 28 tokens."""
    ways = [{"temperature": 0.0, "top_k": 0, "top_p": 1.0} if at % 2 else WAYS[at // 2 % len(WAYS)] for at in range(16)]
    return [
        Question(f"Tell me about {subject}.", Sampling(max_tokens=16 + at % 4 * 4, seed=1000 + at, **params))
        for at, (subject, params) in enumerate(zip(SUBJECTS, ways, strict=True))
    ]


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    with serving(locate(""), tmp_path_factory.mktemp("s"), "--kv-cache-memory=0.2", name=NAME) as server:
        yield server


@pytest.fixture
async def client(server: Server) -> AsyncIterator[openai.AsyncOpenAI]:
    async with openai.AsyncOpenAI(base_url=f"{server.url}/v1", api_key="-", max_retries=0, timeout=PATIENCE) as client:
        yield client


class Ids:
    """Token ids by the bytes that they stand for, of which no two are the same in this vocabulary."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._ids = {tokenizer.token_bytes(id): id for id in range(tokenizer.vocab_size)}
        assert len(self._ids) == tokenizer.vocab_size

    def entry(self, token: ChatCompletionTokenLogprob) -> tuple[int, TokenLogprobs]:
        top = [self._ids[bytes(other.bytes or ())] for other in token.top_logprobs]
        id = self._ids[bytes(token.bytes or ())]
        rank = top.index(id) + 1 if id in top else len(top) + 1
        return id, TokenLogprobs(token.logprob, rank, top, [other.logprob for other in token.top_logprobs])


async def ask(client: openai.AsyncOpenAI, ids: Ids, question: Question, answer: Answer) -> None:
    """Fill `answer`, chunk by chunk."""
    sampling = question.sampling
    chunks = await client.chat.completions.create(
        model=NAME,
        messages=[{"role": "user", "content": question.text}],
        stream=True,
        stream_options={"include_usage": True},
        max_tokens=sampling.max_tokens,
        seed=sampling.seed,
        temperature=sampling.temperature,
        top_p=sampling.top_p,
        logprobs=True,
        top_logprobs=MAX_LOGPROBS,
        extra_body={"ignore_eos": True, "top_k": sampling.top_k},
    )
    async for chunk in chunks:
        take(chunk, ids, answer)


def take(chunk: ChatCompletionChunk, ids: Ids, answer: Answer) -> None:
    for choice in chunk.choices:
        assert answer.finish is None
        answer.text += choice.delta.content or ""
        answer.finish = choice.finish_reason
        for token in (choice.logprobs.content if choice.logprobs else None) or ():
            id, entry = ids.entry(token)
            answer.run.tokens.append(id)
            answer.run.entries.append(entry)
    if chunk.usage:
        answer.completion_tokens = chunk.usage.completion_tokens


async def kill_worker_under_load(server: Server, answers: Sequence[Answer]) -> None:
    """Kill the worker once all streams run; wait until the server is not ready, and then until it is again."""
    await until(lambda: min(len(answer.run.tokens) for answer in answers) >= 4, PATIENCE)
    before = server.children()
    before["worker"].kill()
    await until(lambda: status_is(server, 503), PATIENCE)
    assert all(len(answer.run.tokens) < answer.run.sampling.max_tokens for answer in answers)
    await until(lambda: status_is(server, 200), PATIENCE)
    after = server.children()
    assert {name for name in after if after[name] != before[name]} == {"worker"}


async def status_is(server: Server, status: int) -> bool:
    return await asyncio.to_thread(health, server.url) == status


async def ask_all(
    client: openai.AsyncOpenAI, ids: Ids, asked: Sequence[Question], killed: Server | None = None
) -> list[Answer]:
    answers = [Answer(Run(question.sampling, [], [])) for question in asked]
    async with asyncio.TaskGroup() as tasks:
        for question, answer in zip(asked, answers, strict=True):
            tasks.create_task(ask(client, ids, question, answer))
        if killed is not None:
            tasks.create_task(kill_worker_under_load(killed, answers))
    return answers


async def test_a_killed_worker_is_a_pause(server: Server, client: openai.AsyncOpenAI) -> None:
    tokenizer, asked = Tokenizer.load(locate("")), questions()
    ids = Ids(tokenizer)
    undisturbed = await ask_all(client, ids, asked)
    disturbed = await ask_all(client, ids, asked, killed=server)
    for answer in undisturbed + disturbed:
        expected = answer.run.sampling.max_tokens
        assert (answer.finish, answer.completion_tokens, len(answer.run.tokens)) == ("length", expected, expected)
        assert answer.text == tokenizer.decode(answer.run.tokens)
    runs, others = ([answer.run for answer in answers] for answers in (undisturbed, disturbed))
    assert_alike(runs, others, tokenizer.vocab_size)
