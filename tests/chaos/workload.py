"""The requests of a cell. A random generator decides all of them.

One request, the subject, is what the cell's moment is about: the worker is held when it comes there. Others run beside
it, and one comes after the fault. A queue has many subjects, and it does not matter which of them has to wait.
"""

import random
from collections.abc import Awaitable, Callable, Sequence
from typing import Any

from msgspec import Struct

from shared.text.tokenizer import Tokenizer
from tests.chaos.cells import Moment
from tests.chaos.client import Outcome, Request
from tests.chaos.gate import Hold
from tests.text.vocabulary import SPECIAL, make_tokenizer

SLOTS = 8
"""Sequences that run at the same time at an engine, the scheduler's --max-num-seqs."""

CHUNK = 24
"""Tokens of a step, the scheduler's --max-num-batched-tokens."""

TOKENIZER: Tokenizer = make_tokenizer()
MARKER = len(SPECIAL)  # the first token of a subject, and of no other prompt
TOKENS = range(len(SPECIAL) + 1, TOKENIZER.vocab_size)

Ask = Callable[[Request], Awaitable[Outcome]]


class Workload(Struct):
    """The requests of a cell, and the moment of the first one at which its worker is held."""

    subjects: list[Request]
    others: list[Request]
    latecomer: Request
    hold: Hold


async def draw_workload(moment: Moment, engines: int, rng: random.Random, ask: Ask) -> Workload:
    """Draw the requests of a cell. `ask` runs one that is undisturbed."""
    match moment:
        case Moment.QUEUE:
            num_subjects = SLOTS * engines + 4
            subjects = [_completion(rng, MARKER, **_sampling(rng), max_tokens=30) for _ in range(num_subjects)]
            return Workload(subjects, [], draw_request(rng), Hold("output", MARKER, 2))
        case Moment.CHUNK:
            subject = _long_prompt(rng)
            hold = Hold("chunk", MARKER)
        case Moment.DECODE:
            subject = _completion(rng, MARKER, **_sampling(rng), max_tokens=45)
            hold = Hold("output", MARKER, rng.randrange(3, 35))
        case Moment.FORK:
            subject = _completion(rng, MARKER, 50, n=3, seed=rng.getrandbits(48), max_tokens=25, logprobs=2)
            hold = Hold("fork", MARKER)
        case Moment.STOP:
            subject, hold = await _stopped(rng, ask)
        case Moment.LAST:
            max_tokens = rng.randrange(10, 30)
            subject = _completion(rng, MARKER, **_sampling(rng), max_tokens=max_tokens)
            hold = Hold("output", MARKER, max_tokens - 1)
    return Workload([subject], [draw_request(rng) for _ in range(4)], draw_request(rng), hold)


def draw_request(rng: random.Random) -> Request:
    """Draw one of the kinds of requests."""
    return rng.choice(KINDS)(rng)


def _prompt(rng: random.Random, first: int | None, length: int) -> list[int]:
    return [rng.choice(TOKENS) if first is None else first, *rng.choices(TOKENS, k=length - 1)]


def _completion(rng: random.Random, first: int | None = None, length: int = 0, **fields: Any) -> Request:
    """Return a stream of a completion that does not end by itself, unless `fields` say otherwise."""
    prompt = _prompt(rng, first, length or rng.randrange(5, 60))
    return Request({"prompt": prompt, "stream": True, "ignore_eos": True} | fields)


def _sampling(rng: random.Random) -> dict[str, Any]:
    """Draw greedy or seeded sampling, with log-probabilities or without."""
    ways: Sequence[dict[str, Any]] = (
        {"temperature": 0},
        {"temperature": 0, "repetition_penalty": 1.2, "logprobs": 1},
        {"temperature": 0.9, "seed": rng.getrandbits(48), "logprobs": 3},
        {"temperature": 1.3, "top_k": 20, "seed": rng.getrandbits(48), "presence_penalty": 0.6},
        {"temperature": 0.7, "top_p": 0.8, "seed": rng.getrandbits(48), "frequency_penalty": 0.4, "logprobs": 0},
    )
    return rng.choice(ways)


def _long_prompt(rng: random.Random) -> Request:
    """Return a request with a prompt of several chunks, some with its log-probabilities."""
    if rng.random() < 0.5:
        return _completion(rng, MARKER, 6 * CHUNK, **_sampling(rng), max_tokens=12)
    return _completion(rng, MARKER, 6 * CHUNK, temperature=0, max_tokens=12, stream=False, prompt_logprobs=2)


async def _stopped(rng: random.Random, ask: Ask) -> tuple[Request, Hold]:
    """Return a request with a stop string of two tokens, and the moment between these."""
    while True:
        free = _completion(rng, MARKER, temperature=0.9, seed=rng.getrandbits(48), max_tokens=45, logprobs=0)
        choice = (await ask(free)).choices[0]
        for at, (one, other) in enumerate(zip(choice.logprobs[2:], choice.logprobs[3:], strict=False), 2):
            stop, offset = one[0] + other[0], one[3]
            if stop.isascii() and stop.isprintable() and choice.text.find(stop) == offset:
                fields = {"stop": [stop], "include_stop_str_in_output": rng.random() < 0.5}
                return Request(free.fields | fields), Hold("output", MARKER, at + 1)


def _greedy(rng: random.Random) -> Request:
    return _completion(rng, temperature=0, max_tokens=rng.randrange(20, 60), logprobs=3)


def _seeded_chat(rng: random.Random) -> Request:
    """Return a chat that may end by itself."""
    text = " ".join(rng.choices(("one", "two", "three", "hello", "view", "port"), k=rng.randrange(2, 12)))
    messages = [{"role": "user", "content": text}]
    fields = {"temperature": 0.8, "seed": rng.getrandbits(48), "logprobs": True, "top_logprobs": 2, "stream": True}
    return Request({"messages": messages, "max_tokens": rng.randrange(20, 60), "presence_penalty": 0.5} | fields)


def _parallel(rng: random.Random) -> Request:
    """Return a request of several samples that may end at different lengths."""
    ends: dict[str, Any] = {"ignore_eos": False, "min_tokens": 12, "stop_token_ids": rng.choices(TOKENS, k=20)}
    return _completion(rng, n=2, temperature=1.0, seed=rng.getrandbits(48), max_tokens=40, **ends)


def _scored(rng: random.Random) -> Request:
    """Return a request that is answered as a whole, with the log-probabilities of its prompt."""
    return _completion(rng, None, 70, temperature=0, max_tokens=20, stream=False, prompt_logprobs=1, logprobs=2)


def _echoed(rng: random.Random) -> Request:
    seed = rng.getrandbits(48)
    return _completion(rng, temperature=0.9, seed=seed, max_tokens=30, stream=False, echo=True, logprobs=1)


def _unseeded_stops(rng: random.Random) -> Request:
    """Return a greedy request with stop strings that occur sooner or later."""
    return _completion(rng, temperature=0, max_tokens=50, stop=rng.sample(["one", "a", "e", " f", "st"], k=3))


KINDS = (_greedy, _seeded_chat, _parallel, _scored, _echoed, _unseeded_stops)
