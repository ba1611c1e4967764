"""Tests that a beam search finds what transformers' `generate` finds, with tiny random models in float32.

Both end when nothing can change the result (`early_stopping="never"`). The engine runs the search beside other
requests, with blocks that are taken from beams that wait, and by few slots.
"""

import itertools
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from transformers import PreTrainedModel

from quire.engine import InProcessEngine
from quire.pending_beams import PendingBeams, run_beams
from quire.progress_bar import ProgressBar
from services.scheduler.config import SchedulerConfig
from services.worker.config import WorkerConfig
from shared.beam_params import BeamSearchParams
from shared.protocol import Sampling
from tests.models.tiny_models import llama, opt, save

MODELS: dict[str, Callable[[], PreTrainedModel]] = {"llama": llama, "opt": opt}
LENGTHS = (1, 9, 16, 23)
"""Of the prompts, around the end of a block of 8."""


class Beams(NamedTuple):
    """The result of a search: the output tokens of each beam, up to the stop token, and their scores."""

    tokens: list[list[int]]
    scores: list[float]


class Subject(NamedTuple):
    model: PreTrainedModel
    folder: Path

    def engine(self, **settings: Any) -> InProcessEngine:
        worker = WorkerConfig(
            model=str(self.folder), device="cpu", dtype="float32", num_threads=1, kv_cache_memory=0.05
        )
        return InProcessEngine(SchedulerConfig(block_size=8, max_model_len=64, **settings), worker)


@pytest.fixture(scope="module", params=MODELS)
def subject(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Subject:
    model = MODELS[request.param]()
    assert model.generation_config is not None
    model.generation_config.eos_token_id = None
    return Subject(model, save(model, tmp_path_factory.mktemp("model")))


@pytest.fixture(scope="module")
def engine(subject: Subject) -> InProcessEngine:
    return subject.engine(max_num_seqs=16)


def prompts() -> list[list[int]]:
    rng = torch.Generator().manual_seed(5)
    tokens: list[int] = torch.randint(3, 131, (max(LENGTHS),), generator=rng).tolist()
    return [tokens[:length] for length in LENGTHS]


def by_transformers(model: PreTrainedModel, prompt: list[int], params: BeamSearchParams, **options: Any) -> Beams:
    stops: list[int] = options.get("eos_token_id", [])
    with torch.inference_mode():
        result = model.generate(
            torch.tensor([prompt]),
            num_beams=params.beam_width,
            num_return_sequences=params.beam_width,
            max_new_tokens=params.max_tokens,
            length_penalty=params.length_penalty,
            early_stopping="never",
            do_sample=False,
            output_scores=True,
            return_dict_in_generate=True,
            pad_token_id=0,
            **options,
        )
    outputs = [row[len(prompt) :] for row in result.sequences.tolist()]
    return Beams([up_to_stop(output, stops) for output in outputs], result.sequences_scores.tolist())


def up_to_stop(tokens: list[int], stops: Sequence[int]) -> list[int]:
    """Return the tokens without the padding behind a stop token."""
    end = next((at for at, token in enumerate(tokens) if token in stops), len(tokens))
    return tokens[: end + 1]


def by_quire(
    engine: InProcessEngine, asked: Sequence[list[int]], params: BeamSearchParams, **fields: Any
) -> list[Beams]:
    sampling = Sampling(max_tokens=params.max_tokens, seed=0, temperature=0.0, **fields)
    searches = [PendingBeams(prompt, params, sampling) for prompt in asked]
    run_beams(engine, searches, itertools.count(), ProgressBar(len(searches), use_tqdm=False))
    assert engine.engine.snapshot.blocks_free == engine.engine.snapshot.blocks
    found = [one.branches.search.finished for one in searches]
    return [Beams([one.beam.tokens for one in each], [one.score for one in each]) for each in found]


def assert_same(found: Beams, expected: Beams) -> None:
    assert found.tokens == expected.tokens
    assert found.scores == pytest.approx(expected.scores, rel=1e-5, abs=1e-5)


def likely_stops(model: PreTrainedModel, prompt: list[int], count: int) -> list[int]:
    """Return tokens that plain beams of a model have, so that some beams end early with them."""
    beams = by_transformers(model, prompt, BeamSearchParams(4, 10))
    ranked = dict.fromkeys(token for at in (2, 5, 7) for tokens in beams.tokens for token in tokens[at : at + 1])
    return list(ranked)[:count]


@pytest.mark.parametrize("width", [2, 3, 5, 8])
def test_beams_of_one_length(subject: Subject, engine: InProcessEngine, width: int) -> None:
    params = BeamSearchParams(width, 14)
    for prompt, found in zip(prompts(), by_quire(engine, prompts(), params), strict=True):
        assert_same(found, by_transformers(subject.model, prompt, params))


@pytest.mark.parametrize("width", [2, 5])
@pytest.mark.parametrize("penalty", [-1.0, 0.0, 0.5, 1.0, 2.5])
@pytest.mark.parametrize("num_stops", [1, 3])
def test_beams_that_end(subject: Subject, engine: InProcessEngine, width: int, penalty: float, num_stops: int) -> None:
    params, ended = BeamSearchParams(width, 14, length_penalty=penalty), 0
    for prompt in prompts():
        stops = likely_stops(subject.model, prompt, num_stops)
        (found,) = by_quire(engine, [prompt], params, stop_token_ids=stops)
        assert_same(found, by_transformers(subject.model, prompt, params, eos_token_id=stops))
        ended += sum(tokens[-1] in stops for tokens in found.tokens)
    assert ended or penalty > 2, "none of the beams has ended, although long ones are not preferred"


@pytest.mark.parametrize("width", [2, 5])
def test_beams_that_may_not_end_at_once(subject: Subject, engine: InProcessEngine, width: int) -> None:
    params = BeamSearchParams(width, 12)
    for prompt in prompts():
        stops = likely_stops(subject.model, prompt, 2)
        (found,) = by_quire(engine, [prompt], params, stop_token_ids=stops, min_tokens=5)
        expected = by_transformers(subject.model, prompt, params, eos_token_id=stops, min_new_tokens=5)
        assert_same(found, expected)
        assert min(map(len, found.tokens)) > 5


@pytest.mark.parametrize(
    "settings",
    [
        {"max_num_seqs": 2},
        {"num_gpu_blocks_override": 9, "max_num_seqs": 16},
        {"enable_prefix_caching": False},
    ],
)
def test_beams_do_not_depend_on_slots_blocks_and_the_cache(subject: Subject, settings: dict[str, Any]) -> None:
    params, stops = BeamSearchParams(6, 14), likely_stops(subject.model, prompts()[-1], 1)
    small = subject.engine(**settings)
    found = by_quire(small, prompts(), params, stop_token_ids=stops)
    if "num_gpu_blocks_override" in settings:
        assert small.engine.snapshot.preemptions > 0
    for prompt, beams in zip(prompts(), found, strict=True):
        assert_same(beams, by_transformers(subject.model, prompt, params, eos_token_id=stops))
