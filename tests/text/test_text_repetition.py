"""Tests of the search for repetitions, against its definition."""

import random
from collections.abc import Sequence
from typing import Any

import pytest

from shared.errors import InvalidRequest
from shared.params import RepetitionDetectionParams, SamplingParams
from shared.text.repetition import RepetitionDetector


def repeats(tokens: Sequence[int], params: RepetitionDetectionParams) -> bool:
    """Return whether `tokens` end with `min_count` copies of a pattern, as the definition says."""
    for size in range(max(int(params.min_pattern_size), 1), int(params.max_pattern_size) + 1):
        count = int(params.min_count)
        if len(tokens) >= size * count and tokens[-size * count :] == tokens[-size:] * count:
            return True
    return False


@pytest.mark.parametrize("seed", range(200))
def test_it_finds_what_the_definition_says(seed: int) -> None:
    rng = random.Random(seed)
    longest = rng.randint(1, 6)
    params = RepetitionDetectionParams(
        max_pattern_size=longest, min_pattern_size=rng.randint(0, longest), min_count=rng.randint(2, 4)
    )
    detector, tokens, found = RepetitionDetector(params), [], 0
    output: list[int] = []
    while len(output) < 300:
        output += [rng.randrange(3) for _ in range(rng.randint(1, longest))] * rng.randint(1, 5)
    for token in output:
        tokens.append(token)
        assert detector.push(tokens[-1]) == repeats(tokens, params), (params, tokens)
        found += repeats(tokens, params)
    assert found


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"max_pattern_size": -1}, "max_pattern_size"),
        ({"max_pattern_size": 257, "min_count": 2}, "max_pattern_size"),
        ({"max_pattern_size": 1.5, "min_count": 2}, "max_pattern_size"),
        ({"max_pattern_size": True, "min_count": 2}, "max_pattern_size"),
        ({"min_pattern_size": 1}, "min_pattern_size"),
        ({"max_pattern_size": 3}, "min_count"),
        ({"max_pattern_size": 3, "min_count": 10**9}, "min_count"),
    ],
)
def test_what_is_no_repetition_is_refused_by_name(fields: dict[str, Any], param: str) -> None:
    with pytest.raises(InvalidRequest) as refused:
        RepetitionDetectionParams(**fields)
    assert refused.value.param == f"repetition_detection.{param}"


def test_the_parameters_are_a_struct() -> None:
    with pytest.raises(InvalidRequest, match="must be a RepetitionDetectionParams"):
        SamplingParams(repetition_detection={"max_pattern_size": 3})  # type: ignore[arg-type]
