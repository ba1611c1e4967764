"""A client of chats, which puts what it gets back into token ids: the API tells each token's bytes.

So what is streamed can be compared by the rules of exactness: tokens and log-probabilities.
"""

import asyncio
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager

import openai
from msgspec import Struct
from openai.types.chat.chat_completion_chunk import ChatCompletionChunk
from openai.types.chat.chat_completion_token_logprob import ChatCompletionTokenLogprob

from shared.params import MAX_LOGPROBS
from shared.protocol import Sampling, TokenLogprobs
from shared.text.tokenizer import Tokenizer
from tests.exactness.margin_rule import Run
from tests.quire.quire_server import Server, healthy
from tests.waiting import until

PATIENCE = 120.0  # seconds; reached only by tests that fail


class Question(Struct):
    """A question of one client, and the sampling parameters of its `n` answers."""

    text: str
    sampling: Sampling
    n: int = 1


class Answer(Struct):
    """The output that one client has received so far."""

    run: Run
    text: str = ""
    finish: str | None = None


class Reply(Struct):
    """The answers to a question, and the usage that the server has reported."""

    answers: list[Answer]
    completion_tokens: int = 0
    cached_tokens: int = 0


class ChatClient:
    """Asks the model that a server has under `name`. Token ids are found by their bytes, which must all differ."""

    def __init__(self, api: openai.AsyncOpenAI, name: str, tokenizer: Tokenizer) -> None:
        self._api, self._name = api, name
        self._ids = {tokenizer.token_bytes(id): id for id in range(tokenizer.vocab_size)}
        assert len(self._ids) == tokenizer.vocab_size

    async def ask_all(
        self, questions: Sequence[Question], killed: Server | None = None, victim: str = "worker"
    ) -> list[Reply]:
        """Return the replies to questions that are asked at the same time; meanwhile a process of `killed` dies."""
        replies = [
            Reply([Answer(Run(question.sampling, [], [], sample)) for sample in range(question.n)])
            for question in questions
        ]
        async with asyncio.TaskGroup() as tasks:
            for question, reply in zip(questions, replies, strict=True):
                tasks.create_task(self._ask(question, reply))
            if killed is not None:
                answers = [answer for reply in replies for answer in reply.answers]
                tasks.create_task(kill_under_load(killed, victim, answers))
        return replies

    async def _ask(self, question: Question, reply: Reply) -> None:
        """Fill `reply`, chunk by chunk."""
        sampling = question.sampling
        chunks = await self._api.chat.completions.create(
            model=self._name,
            messages=[{"role": "user", "content": question.text}],
            n=question.n,
            stream=True,
            stream_options={"include_usage": True},
            max_tokens=sampling.max_tokens,
            seed=sampling.seed,
            temperature=sampling.temperature,
            top_p=sampling.top_p,
            presence_penalty=sampling.presence_penalty,
            frequency_penalty=sampling.frequency_penalty,
            logprobs=True,
            top_logprobs=MAX_LOGPROBS,
            extra_body={
                "ignore_eos": True,
                "top_k": sampling.top_k,
                "repetition_penalty": sampling.repetition_penalty,
                "min_tokens": sampling.min_tokens,
            },
        )
        async for chunk in chunks:
            self._take(chunk, reply)

    def _take(self, chunk: ChatCompletionChunk, reply: Reply) -> None:
        for choice in chunk.choices:
            answer = reply.answers[choice.index]
            assert answer.finish is None
            answer.text += choice.delta.content or ""
            answer.finish = choice.finish_reason
            for token in (choice.logprobs.content if choice.logprobs else None) or ():
                id, entry = self._entry(token)
                answer.run.tokens.append(id)
                answer.run.entries.append(entry)
        if chunk.usage:
            assert chunk.usage.prompt_tokens_details is not None
            reply.completion_tokens = chunk.usage.completion_tokens
            reply.cached_tokens = chunk.usage.prompt_tokens_details.cached_tokens or 0

    def _entry(self, token: ChatCompletionTokenLogprob) -> tuple[int, TokenLogprobs]:
        top = [self._ids[bytes(other.bytes or ())] for other in token.top_logprobs]
        id = self._ids[bytes(token.bytes or ())]
        rank = top.index(id) + 1 if id in top else len(top) + 1
        return id, TokenLogprobs(token.logprob, rank, top, [other.logprob for other in token.top_logprobs])


@asynccontextmanager
async def chat_client(server: Server, name: str, tokenizer: Tokenizer) -> AsyncIterator[ChatClient]:
    """Yield a client of `server`, once that is ready."""
    url = f"{server.url}/v1"
    async with openai.AsyncOpenAI(base_url=url, api_key="-", max_retries=0, timeout=PATIENCE) as api:
        yield ChatClient(api, name, tokenizer)


async def kill_under_load(server: Server, victim: str, answers: Sequence[Answer]) -> None:
    """Kill a process once all streams run, and wait until the server is ready with the next one."""
    await until(lambda: min(len(answer.run.tokens) for answer in answers) >= 4, PATIENCE)
    # A client may be late: some may have ended.
    assert any(len(answer.run.tokens) < answer.run.sampling.max_tokens for answer in answers)
    await replace(server, victim)


async def replace(server: Server, victim: str) -> None:
    """Kill a process, and wait until the server is ready with the next one, and with no other new one."""
    before = server.children()
    before[victim].kill()
    await until(lambda: server.children().get(victim) not in (before[victim], None), PATIENCE)
    await until(lambda: is_ready(server), PATIENCE)
    after = server.children()
    assert {name for name in after if after[name] != before[name]} == {victim}


async def is_ready(server: Server) -> bool:
    return await asyncio.to_thread(healthy, server.url)


def check_whole(replies: Sequence[Reply], tokenizer: Tokenizer) -> list[Run]:
    """Fail unless all answers have the length that was asked for, and the text of their tokens. Return their runs."""
    for reply in replies:
        expected = reply.answers[0].run.sampling.max_tokens
        assert reply.completion_tokens == expected * len(reply.answers)
        for answer in reply.answers:
            assert (answer.finish, len(answer.run.tokens)) == ("length", expected)
            assert answer.text == tokenizer.decode(answer.run.tokens)
    return [answer.run for reply in replies for answer in reply.answers]
