"""`quire serve` with the embedded model, whose worker or scheduler is killed under load: for its clients, a pause.

The streams are compared with undisturbed ones: tokens and log-probabilities, to the last bit.
"""

from pathlib import Path
from typing import Any

import pytest

from shared.hub.checkpoint import locate
from shared.protocol import Sampling
from shared.text.tokenizer import Tokenizer
from tests.exactness.chat_client import Question, chat_client, check_whole
from tests.exactness.equality import EXACT, assert_alike
from tests.quire.quire_server import serving

NAME = "smol"

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


def questions() -> list[Question]:
    """Return questions, half of them greedy, with answers of 28 to 40 tokens; some have two, and some penalties."""
    ways = [{"temperature": 0.0, "top_k": 0, "top_p": 1.0} if at % 2 else WAYS[at // 2 % len(WAYS)] for at in range(16)]
    if EXACT:  # otherwise runs are compared by a rule that does not know penalties
        for at in (2, 3, 10, 11):
            ways[at] |= {"presence_penalty": 0.7, "frequency_penalty": 0.2, "repetition_penalty": 1.2, "min_tokens": 20}
    return [
        Question(f"Tell me about {subject}.", Sampling(max_tokens=28 + at % 4 * 4, seed=1000 + at, **params), n)
        for at, (subject, params) in enumerate(zip(SUBJECTS, ways, strict=True))
        for n in [2 if at % 5 == 4 else 1]
    ]


@pytest.mark.parametrize("victim", ["worker", "scheduler"])
async def test_a_killed_process_is_a_pause(victim: str, tmp_path: Path) -> None:
    tokenizer, asked = Tokenizer.load(locate("")), questions()
    with serving(locate(""), tmp_path, "--kv-cache-memory=0.2", name=NAME) as server:
        async with chat_client(server, NAME, tokenizer) as client:
            undisturbed = await client.ask_all(asked)
            disturbed = await client.ask_all(asked, killed=server, victim=victim)
    runs, others = check_whole(undisturbed, tokenizer), check_whole(disturbed, tokenizer)
    assert_alike(runs, others, tokenizer.vocab_size)
