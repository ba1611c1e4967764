"""Runs an engine of the embedded model on mixed requests, and checks each row that it returns.

A seed determines all requests. Half of the prompts are text, the others arbitrary ids; half of the requests are
greedy. All report the 20 likeliest tokens, which the margin rule needs, and none ends before its max_tokens.
"""

import itertools
import random
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from msgspec import Struct
from msgspec.structs import replace

from quire.engine import InProcessEngine
from services.scheduler.config import SchedulerConfig
from services.worker.config import WorkerConfig
from shared.hub.checkpoint import locate
from shared.params import MAX_LOGPROBS
from shared.protocol import FinishReason, ProgressRow, Sampling, Submit, pack_tokens
from shared.text.tokenizer import Tokenizer
from tests.exactness.margin_rule import Run

TEXT = (
    "The lighthouse keeper wrote a letter every evening and gave it to the first ship that passed in the morning. "
    "Nobody on the island knew who answered them, but an answer came with each spring tide, in a blue envelope, and "
    "he read it aloud to the gulls. In the year of the great storm the ships stayed away for thirty days. He went on "
    "writing, put the letters in a row along the window and numbered them. When the sea was calm again, a boat came "
    "with a single passenger, who carried a bag of blue envelopes and asked for the way to the tower. "
)
SAMPLED_FROM_FEW: tuple[dict[str, Any], ...] = (
    {"temperature": 0.8, "top_k": 12},
    {"temperature": 1.3, "top_k": 18, "top_p": 0.9},
    {"temperature": 1.0, "top_k": 5, "top_p": 0.95},
)
"""Parameters that leave so few tokens that all are reported, even of the flat distributions after arbitrary ids."""

SAMPLED = (*SAMPLED_FROM_FEW, {"temperature": 0.7, "top_p": 0.4}, {"temperature": 0.2})
EDGES = (15, 16, 17, 31, 32, 33, 48)
"""Prompt lengths around the ends of blocks of 16 tokens."""


class Request(NamedTuple):
    """A prompt, and the parameters of its continuation."""

    prompt: list[int]
    sampling: Sampling


def draw_requests(count: int, *, seed: int = 0, longest: int = 300) -> list[Request]:
    """Return `count` requests: prompts of `EDGES` and of 1 to `longest` tokens, mostly short, and 4 to 24 of output.

    Texts of the lengths `EDGES` are prefixes of each other.
    """
    rng = random.Random(seed)
    tokenizer = Tokenizer.load(locate(""))
    words = tokenizer.encode(TEXT, add_special_tokens=False)
    ordinary = [id for id in range(tokenizer.vocab_size) if tokenizer.special_token(id) is None]
    lengths = [1, longest, *EDGES]
    lengths += [round(longest ** rng.random() ** 1.3) for _ in range(count - len(lengths))]
    rng.shuffle(lengths)
    requests = []
    for index, length in enumerate(lengths):
        max_tokens = 4 + round(
            (20 if length < 64 else 4) * rng.random() ** 4
        )  # short prompts get long outputs, which crowd the pool
        sampling = Sampling(max_tokens=max_tokens, seed=rng.getrandbits(64), logprobs=MAX_LOGPROBS, temperature=0.0)
        if of_text := index % 4 < 2:
            start = 0 if length in EDGES else rng.randrange(len(words))
            prompt = [words[place % len(words)] for place in range(start, start + length)]
        else:
            prompt = rng.sample(ordinary, length)
        if index % 2:
            params = SAMPLED if of_text else SAMPLED_FROM_FEW
            sampling = replace(sampling, **params[index // 4 % len(params)])
        requests.append(Request(prompt, sampling))
    return requests


def engine(dtype: Any = "auto", *, worker: Mapping[str, Any] = {}, **settings: Any) -> InProcessEngine:
    """Return an engine of the embedded model on one CPU thread. With dtype `auto` its weights stay quantised.

    `settings` are the scheduler's.
    """
    config = WorkerConfig(model="", device="cpu", dtype=dtype, num_threads=1, kv_cache_memory=0.25, **worker)
    return InProcessEngine(SchedulerConfig(**settings), config)


class Output(Struct):
    """The rows of one request, put together."""

    run: Run
    cached_tokens: int = 0
    finish: FinishReason | None = None


_ids = itertools.count()  # an engine must not get the same id twice


def serve(engine: InProcessEngine, requests: Sequence[Request]) -> list[Output]:
    """Run all requests at once, to their ends. Fail if a row does not continue its request where the last row ended."""
    outputs = {next(_ids): Output(Run(request.sampling, [], [])) for request in requests}
    for (id, output), request in zip(outputs.items(), requests, strict=True):
        tokens = pack_tokens(request.prompt)
        engine.submit(Submit(id=id, tokens=tokens, prompt_len=len(request.prompt), sampling=output.run.sampling))
    while engine.engine.unfinished:
        for row in engine.step():
            _apply(row, outputs[row.id])
    assert all(output.finish is FinishReason.LENGTH for output in outputs.values())
    snapshot = engine.engine.snapshot
    assert snapshot.running == snapshot.waiting == 0
    assert snapshot.blocks_free == snapshot.blocks
    return list(outputs.values())


def _apply(row: ProgressRow, output: Output) -> None:
    tokens, entries = output.run.tokens, output.run.entries
    assert output.finish is None
    assert row.position == len(tokens)  # no token is sent twice or left out
    assert row.logprobs is not None
    assert len(row.logprobs) == len(row.tokens) > 0
    tokens += row.tokens
    entries += row.logprobs
    output.cached_tokens, output.finish = max(output.cached_tokens, row.cached_tokens), row.finish_reason
