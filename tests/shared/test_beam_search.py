"""Tests of `BeamSearch` and `BeamBranches`, with a toy model and an obviously right search."""

import itertools
import random
from collections.abc import Sequence
from typing import Any, NamedTuple

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec.structs import replace

from shared import beam_branches
from shared.beam_branches import BeamBranches, Branch
from shared.beam_params import MAX_BEAM_TOKENS, BeamSearchParams, BeamSettings
from shared.beam_search import BeamSearch
from shared.errors import InvalidRequest
from shared.protocol import FinishReason, ProgressRow, Sampling
from tests.toy_model import ToyModel

PROMPT = [7, 7]


class Found(NamedTuple):
    """A sequence that a search returns."""

    tokens: tuple[int, ...]
    score: float
    reason: str


class Case(NamedTuple):
    """A search of a toy model."""

    model: ToyModel
    settings: BeamSettings
    sampling: Sampling

    def distributions(self, search: BeamSearch) -> list[Any]:
        count = min(self.settings.num_candidates(self.sampling), self.model.vocab_size)
        return [self.model.distribution(PROMPT + beam.tokens, count) for beam in search.running]


@st.composite
def cases(draw: st.DrawFn) -> Case:
    num_stops = draw(st.integers(0, 3))
    width = draw(st.integers(1, 6))
    vocab_size = draw(st.integers(width + num_stops, 14))
    max_tokens = draw(st.integers(1, 6))
    sampling = Sampling(
        max_tokens=max_tokens,
        seed=0,
        stop_token_ids=list(range(num_stops)),
        min_tokens=draw(st.integers(0, max_tokens)),
        logprobs=draw(st.integers(-1, 3)),
    )
    penalty = draw(st.sampled_from([-2.0, -0.5, 0.0, 0.6, 1.0, 1.7, 4.0]))
    return Case(ToyModel(vocab_size, draw(st.integers(0, 10**6))), BeamSettings(width, penalty), sampling)


def found_by(search: BeamSearch) -> list[Found]:
    return [Found(tuple(one.beam.tokens), one.score, one.finish_reason.value) for one in search.finished]


def expected(case: Case) -> list[Found]:
    """Return the result of a search that considers every token, and goes on to the last step whatever it has found."""
    (width, penalty), sampling = (case.settings.width, case.settings.length_penalty), case.sampling
    running: list[tuple[float, tuple[int, ...]]] = [(0.0, ())]
    found: list[Found] = []

    def score(total: float, tokens: tuple[int, ...]) -> float:
        return total / len(tokens) ** penalty

    for length in range(1, sampling.max_tokens + 1):
        extended = [
            (total + logprob, (*tokens, token))
            for total, tokens in running
            for token, logprob in enumerate(case.model.logprobs([*PROMPT, *tokens]))
            if token not in sampling.stop_token_ids or length > sampling.min_tokens
        ]
        extended.sort(reverse=True)
        stopped = [one for one in extended[:width] if one[1][-1] in sampling.stop_token_ids]
        found += [Found(tokens, score(total, tokens), "stop") for total, tokens in stopped]
        if length == sampling.max_tokens:
            cut = [one for one in extended[:width] if one not in stopped]
            found += [Found(tokens, score(total, tokens), "length") for total, tokens in cut]
        running = [one for one in extended if one[1][-1] not in sampling.stop_token_ids][:width]
    return sorted(found, key=lambda one: -one.score)[:width]


def assert_same(found: Sequence[Found], other: Sequence[Found]) -> None:
    assert [(one.tokens, one.reason) for one in found] == [(one.tokens, one.reason) for one in other]
    assert [one.score for one in found] == pytest.approx([one.score for one in other])


@given(cases())
@settings(max_examples=300, deadline=None)
def test_a_search_finds_what_a_longer_one_would(case: Case) -> None:
    """It considers only the likeliest tokens and ends early, neither of which changes its result."""
    search = BeamSearch(case.settings, case.sampling)
    while search.running:
        assert len({beam.length for beam in search.running}) == 1
        search.advance(case.distributions(search))
    assert_same(found_by(search), expected(case))
    assert len(search.finished) == case.settings.width


@given(st.integers(0, 10**6))
@settings(max_examples=30, deadline=None)
def test_a_wide_search_finds_the_best_of_all_sequences(seed: int) -> None:
    model, stop = ToyModel(4, seed), 0
    case = Case(model, BeamSettings(32), Sampling(max_tokens=3, seed=0, stop_token_ids=[stop]))
    search = BeamSearch(case.settings, case.sampling)
    while search.running:
        search.advance(case.distributions(search))
    ended = [
        tokens
        for length in (1, 2, 3)
        for tokens in itertools.product(range(4), repeat=length)
        if stop not in tokens[:-1] and (length == 3 or tokens[-1] == stop)
    ]

    def score(tokens: Sequence[int]) -> float:
        return sum(model.logprobs([*PROMPT, *tokens[:at]])[token] for at, token in enumerate(tokens)) / len(tokens)

    assert [one.tokens for one in found_by(search)] == sorted(ended, key=score, reverse=True)[:32]


def test_a_search_ends_as_soon_as_nothing_can_change() -> None:
    """The stop token is nearly certain, so that other beams cannot catch up; with a higher penalty they might."""
    steps = []
    for penalty in (0.0, 8.0):
        search = BeamSearch(BeamSettings(1, penalty), Sampling(max_tokens=9, seed=0, stop_token_ids=[0]))
        count = 0
        while search.running:
            row = ToyModel(3).distribution([], 3)
            search.advance([replace(row, top_ids=[0, 1, 2], top_logprobs=[-0.01, -4.7, -5.1])])
            count += 1
        steps.append(count)
    assert steps == [1, 9]


def test_beams_keep_the_log_probabilities_that_are_wanted() -> None:
    model = ToyModel(9)
    for wanted in (-1, 0, 2):
        case = Case(model, BeamSettings(3), Sampling(max_tokens=4, seed=0, logprobs=wanted))
        search = BeamSearch(case.settings, case.sampling)
        while search.running:
            search.advance(case.distributions(search))
        for finished in search.finished:
            tokens, entries = finished.beam.tokens, finished.beam.all_logprobs
            if wanted < 0:
                assert entries is None
                continue
            assert entries is not None
            assert sum(entry.logprob for entry in entries) == pytest.approx(finished.beam.cum_logprob)
            for at, (token, entry) in enumerate(zip(tokens, entries, strict=True)):
                logprobs = model.logprobs(PROMPT + tokens[:at])
                assert entry.logprob == logprobs[token]
                assert entry.rank == 1 + sum(other > entry.logprob for other in logprobs)
                assert entry.top_logprobs == sorted(logprobs, reverse=True)[:wanted]
                assert entry.top_ids == [logprobs.index(value) for value in entry.top_logprobs]


class ToyEngine:
    """Runs branches by the toy model: in each turn some of them, in any order, one or two tokens each."""

    def __init__(self, case: Case, rng: random.Random) -> None:
        self.running: dict[Branch, list[int]] = {}
        self.samplings: dict[Branch, Sampling] = {}
        self.num_computed = self.num_submitted = 0
        self._case, self._rng = case, rng

    def submit(self, branch: Branch, sampling: Sampling) -> None:
        assert branch not in self.samplings
        self.samplings[branch], self.running[branch] = sampling, list(branch.beam.tokens)
        assert len(self.running[branch]) < sampling.max_tokens
        self.num_submitted += 1

    def turn(self) -> None:
        assert self.running
        for branch in self._rng.sample(list(self.running), self._rng.randint(1, len(self.running))):
            for _ in range(self._rng.randint(1, 2)):
                if branch in self.running:
                    self._compute(branch)

    def _compute(self, branch: Branch) -> None:
        sampling, tokens = self.samplings[branch], self.running[branch]
        row = self._case.model.distribution(PROMPT + tokens, min(sampling.logprobs, self._case.model.vocab_size))
        token, position = row.top_ids[0], len(tokens)
        tokens.append(token)
        self.num_computed += 1
        ended = FinishReason.LENGTH if len(tokens) == sampling.max_tokens else None
        if ended:
            del self.running[branch]
        branch.add(ProgressRow(0, 0, position, [token], [row], finish_reason=ended))


def run_branches(case: Case, rng: random.Random) -> tuple[BeamSearch, ToyEngine]:
    engine, branches = ToyEngine(case, rng), BeamBranches(case.settings, case.sampling)
    engine.submit(branches.branches[0], branches.sampling(branches.branches[0]))
    while branches.branches:
        while not all(branch.has_step for branch in branches.branches):
            engine.turn()
        changes = branches.advance()
        for branch, origin in changes.started:
            assert origin in engine.samplings
            engine.submit(branch, branches.sampling(branch))
        for branch in changes.dropped:
            engine.running.pop(branch, None)
        assert set(engine.running) <= set(branches.branches)
    assert not engine.running
    return branches.search, engine


@given(cases(), st.integers(0, 10**6), st.sampled_from([1, 2, 4, 99]))
@settings(max_examples=300, deadline=None)
def test_branches_find_what_the_search_finds(case: Case, seed: int, lookahead: int) -> None:
    """Whatever the order in which an engine computes them, and however far they run ahead."""
    direct = BeamSearch(case.settings, case.sampling)
    while direct.running:
        direct.advance(case.distributions(direct))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(beam_branches, "LOOKAHEAD", lookahead)
        search, _ = run_branches(case, random.Random(seed))
    assert_same(found_by(search), found_by(direct))


def test_one_beam_is_submitted_once_for_each_lookahead() -> None:
    case = Case(ToyModel(20), BeamSettings(1), Sampling(max_tokens=4 * beam_branches.LOOKAHEAD, seed=0))
    _, engine = run_branches(case, random.Random(0))
    assert (engine.num_submitted, engine.num_computed) == (4, 4 * beam_branches.LOOKAHEAD)


def test_only_the_first_branch_scores_the_prompt() -> None:
    sampling = Sampling(max_tokens=40, seed=3, prompt_logprobs=2, logprobs=4, stop_token_ids=[1], temperature=0.7)
    case = Case(ToyModel(12), BeamSettings(3), sampling)
    _, engine = run_branches(case, random.Random(0))
    first, *others = engine.samplings.values()
    assert first == Sampling(max_tokens=beam_branches.LOOKAHEAD, seed=0, temperature=0.0, logprobs=4, prompt_logprobs=2)
    assert others
    assert {one.prompt_logprobs for one in others} == {-1}
    assert max(one.max_tokens for one in others) == 40


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"beam_width": 0}, "beam_width"),
        ({"beam_width": 33}, "beam_width"),
        ({"beam_width": 2.5}, "beam_width"),
        ({"max_tokens": -1}, "max_tokens"),
        ({"max_tokens": "9"}, "max_tokens"),
        ({"temperature": 0.5}, "temperature"),
        ({"length_penalty": 11.0}, "length_penalty"),
        ({"length_penalty": float("nan")}, "length_penalty"),
        ({"ignore_eos": 1}, "ignore_eos"),
        ({"skip_special_tokens": None}, "skip_special_tokens"),
    ],
)
def test_wrong_parameters_are_named(fields: dict[str, Any], param: str) -> None:
    with pytest.raises(InvalidRequest) as error:
        BeamSearchParams(**({"beam_width": 2, "max_tokens": 9} | fields))
    assert error.value.param == param
    assert error.value.message.startswith(param)


@pytest.mark.parametrize(
    ("width", "prompt_len", "sampling", "param"),
    [
        (4, 5, Sampling(max_tokens=0, seed=0), "max_tokens"),
        (32, MAX_BEAM_TOKENS // 32 - 9, Sampling(max_tokens=10, seed=0), "max_tokens"),
        (32, 5, Sampling(max_tokens=9, seed=0, stop_token_ids=list(range(33))), "stop_token_ids"),
        (32, 5, Sampling(max_tokens=9, seed=0, stop_token_ids=[1] * 9), "stop_token_ids"),
    ],
)
def test_what_a_search_may_ask_of_an_engine_is_bounded(
    width: int, prompt_len: int, sampling: Sampling, param: str
) -> None:
    beams, vocab_size = BeamSettings(width), 1000 if len(sampling.stop_token_ids) != 9 else 40
    with pytest.raises(InvalidRequest, match=r"in a beam search|a beam search may have") as error:
        beams.check(prompt_len, sampling, vocab_size)
    assert error.value.param == param
    BeamSettings(2).check(prompt_len, replace(sampling, max_tokens=9), 1000)
