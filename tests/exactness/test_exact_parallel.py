"""The embedded model on several ranks: a request gets what it gets on one, as far as sums in another order allow.

On groups of one shape the bits do not depend on the other requests, as on one rank.
"""

from collections.abc import Iterator

import pytest

from quire.engine import InProcessEngine
from tests.exactness.embedded_model import Output, Request, draw_requests, engine, serve
from tests.exactness.equality import assert_alike
from tests.exactness.margin_rule import Run, assert_same

SHAPES = {"tensor": {"tensor_parallel_size": 3}, "pipeline": {"pipeline_parallel_size": 2}}  # it has nine heads


@pytest.fixture(scope="module")
def requests() -> list[Request]:
    return draw_requests(12, seed=8, longest=60)


@pytest.fixture(scope="module")
def on_one(requests: list[Request]) -> list[Run]:
    return runs(serve(engine("float32"), requests))


@pytest.fixture(scope="module", params=list(SHAPES))
def group(request: pytest.FixtureRequest) -> Iterator[InProcessEngine]:
    """A group that computes in float32: with 8 bits, each rank rounds its activations by itself."""
    group = engine("float32", worker=SHAPES[request.param])
    yield group
    group.close()


@pytest.fixture(scope="module")
def on_group(group: InProcessEngine, requests: list[Request]) -> list[Run]:
    return runs(serve(group, requests))


def runs(outputs: list[Output]) -> list[Run]:
    return [output.run for output in outputs]


def test_a_group_says_what_one_rank_says(on_one: list[Run], on_group: list[Run], group: InProcessEngine) -> None:
    assert_same(on_one, on_group, group.model.vocab_size)


def test_logprobs_hardly_move(on_one: list[Run], on_group: list[Run]) -> None:
    for one, two in zip(on_one, on_group, strict=True):
        for own, other in zip(one.entries, two.entries, strict=False):
            if own.top_ids != other.top_ids:  # two that are nearly equal have changed places, or all is different now
                break
            assert abs(own.logprob - other.logprob) < 1e-4


def test_bits_do_not_depend_on_other_requests(
    on_group: list[Run], group: InProcessEngine, requests: list[Request]
) -> None:
    alone = [serve(group, [request])[0].run for request in requests[::3]]
    assert_alike(on_group[::3], alone, group.model.vocab_size)
