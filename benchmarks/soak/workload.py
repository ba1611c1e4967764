"""Makes the requests of a soak: a limited set of distinct ones, so that an idle server can answer each once."""

import random
from typing import Any, NamedTuple

TOPICS = (
    "the sea", "a small garden", "how bread is made", "the moon", "trains at night", "why leaves fall",
    "an old bridge", "learning to swim", "bees", "the first snow", "a busy kitchen", "mountains",
)  # fmt: skip
SHARED_PREFIX = (
    "You are a careful assistant. You answer in plain English and in short sentences. You give the reason first, and "
    "then an example. You never repeat the question. If you are not sure, you say so, and you name what you would have "
    "to know. You like lists of three, and you count them. "
)
STOPS = ([". "], ["\n\n", " and"], [","])
LONG = 6
"""Times that a long prompt repeats itself."""


class StreamRequest(NamedTuple):
    """What a client posts."""

    path: str
    body: dict[str, Any]


def make_requests(count: int, seed: int) -> list[StreamRequest]:
    """Return `count` distinct streams: greedy and seeded, short and long, with n > 1, stop strings, and so on."""
    numbers = random.Random(f"requests {seed}")
    return [_make_request(at, numbers) for at in range(count)]


def _make_request(at: int, numbers: random.Random) -> StreamRequest:
    topic = TOPICS[at % len(TOPICS)]
    text = f"Number {at}: tell me about {topic}. " * numbers.choice((1, 1, LONG))
    prefix = SHARED_PREFIX if numbers.random() < 0.5 else ""
    body: dict[str, Any] = {
        "max_tokens": numbers.choice((12, 40, 80, 120)),
        "n": numbers.choice((1, 1, 1, 2, 3)),
        "stream": True,
        "stream_options": {"include_usage": True},
    }
    body |= numbers.choice(({"temperature": 0}, {"temperature": 0.9, "top_p": 0.95, "seed": at}))
    body |= numbers.choice(({}, {"stop": numbers.choice(STOPS)}, {"ignore_eos": True}, {"min_tokens": 10}))
    body |= numbers.choice(({}, {}, {"presence_penalty": 0.6, "frequency_penalty": 0.4}, {"repetition_penalty": 1.2}))
    if numbers.random() < 0.5:
        body |= numbers.choice(({}, {"logprobs": 20}))
        return StreamRequest("/v1/completions", body | {"prompt": prefix + text})
    body |= numbers.choice(({}, {"logprobs": True, "top_logprobs": 20}))
    system = [{"role": "system", "content": prefix}] if prefix else []
    return StreamRequest("/v1/chat/completions", body | {"messages": [*system, {"role": "user", "content": text}]})
