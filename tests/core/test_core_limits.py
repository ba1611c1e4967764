"""Tests that sizes are checked where they are made, and that errors name them as the user knows them."""

import pytest

from services.scheduler.core import Limits
from shared.errors import ConfigError

GOOD = {"num_blocks": 10, "max_num_seqs": 4, "max_num_batched_tokens": 5, "max_model_len": 160}


@pytest.mark.parametrize(
    ("changes", "flag"),
    [
        ({"num_blocks": 0}, "--num-blocks"),
        ({"max_num_seqs": 0}, "--max-num-seqs"),
        ({"block_size": 0}, "--block-size"),
        ({"max_queued_requests": 0}, "--max-queued-requests"),
        ({"max_queued_tokens": -1}, "--max-queued-tokens"),
        ({"max_num_batched_tokens": 4}, "--max-num-batched-tokens must be more than --max-num-seqs"),
        ({"max_model_len": 161}, "--max-model-len must be at most the 160 tokens"),
        ({"depth": 66}, "--depth"),
        ({"priority_ageing": 1.0}, "--priority-ageing needs --scheduling-policy priority"),
        ({"priority_ageing": -1.0, "policy": "priority"}, "--priority-ageing"),
    ],
)
def test_sizes_that_cannot_work_are_refused_by_name(changes: dict[str, object], flag: str) -> None:
    Limits(**GOOD)  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match=flag):
        Limits(**{**GOOD, **changes})  # type: ignore[arg-type]
