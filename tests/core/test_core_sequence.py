"""Tests that states move as the table allows, and that the numbers of a sequence say what is left to do."""

from array import array

import pytest

from services.scheduler.core.block_manager import BlockManager
from services.scheduler.core.plan_builder import PlanBuilder
from services.scheduler.core.sequence import MOVES, Request, Sequence, State
from services.scheduler.core.step_time import StepTime
from services.scheduler.core.swap_policy import SwapPolicy
from shared.protocol import Sampling


def _sequence(max_tokens: int = 5, sample: int = 0, prompt_logprobs: int = -1) -> Sequence:
    sampling = Sampling(max_tokens=max_tokens, seed=0, prompt_logprobs=prompt_logprobs)
    return Request(7, 3, sampling, (0.0, 1.0, 2), 0).start(sample, array("i", [1, 2, 3]))


@pytest.mark.parametrize("start", State)
@pytest.mark.parametrize("goal", State)
def test_only_moves_of_the_table_are_legal(start: State, goal: State) -> None:
    sequence = _sequence()
    sequence.state = start
    if goal in MOVES[start]:
        sequence.move(goal)
        assert sequence.state is goal
    else:
        with pytest.raises(RuntimeError, match="illegal move"):
            sequence.move(goal)


def test_the_last_token_of_an_output_needs_no_computing_but_that_of_a_scored_prompt_does() -> None:
    progress = _sequence(max_tokens=2).progress
    assert (progress.num_unscheduled, progress.max_num_tokens, progress.max_num_computed) == (3, 5, 4)
    assert [progress.schedule(3), progress.schedule(1)] == [1, 1]
    assert (progress.num_scheduled, progress.num_tokens) == (4, 5)
    assert progress.num_unscheduled == 0
    scored = _sequence(max_tokens=0).progress
    assert (scored.num_unscheduled, scored.max_num_tokens, scored.max_num_computed) == (3, 3, 3)
    assert scored.schedule(3) == scored.row_samples == 0


def test_rewinding_keeps_tokens_and_nothing_that_a_worker_knew() -> None:
    policy = SwapPolicy("recompute", 4, StepTime())
    sequence, block_manager = _sequence(), BlockManager(2, 4, False, policy)
    block_manager.allocate(sequence, block_manager.match_prefix(sequence, spare=0), PlanBuilder())
    sequence.slot = 3
    sequence.progress.schedule(3)
    sequence.progress.schedule(1)
    sequence.append_token(9)
    block_manager.release(sequence)
    sequence.rewind()
    progress = sequence.progress
    assert sequence.tokens.tolist() == [1, 2, 3, 9]
    assert (sequence.slot, sequence.table.blocks) == (-1, [])
    assert (progress.num_scheduled, progress.num_tokens, progress.in_flight) == (0, 4, 0)
    assert repr(sequence) == "<Sequence 7.0 waiting 0/0/4/8 slot=-1>"


def test_a_prompt_is_scored_for_the_first_sample_only() -> None:
    assert _sequence(sample=0, prompt_logprobs=2).sampling.prompt_logprobs == 2
    assert _sequence(sample=1, prompt_logprobs=2).sampling.prompt_logprobs == -1
