"""`Counters`: the numbers that the core has counted since its start, for the metrics."""

from bisect import bisect_left

import msgspec
from msgspec import Struct

from shared.protocol import STEP_TOKEN_BUCKETS, FinishReason


class Counters(Struct):
    """The counters of a `Snapshot`, under the same names."""

    steps: int = 0
    step_tokens: list[int] = msgspec.field(default_factory=lambda: [0] * (len(STEP_TOKEN_BUCKETS) + 1))
    step_tokens_sum: int = 0
    preemptions: int = 0
    prefix_queries: int = 0
    prefix_hits: int = 0
    prompt_tokens: int = 0
    prompt_tokens_cached: int = 0
    generation_tokens: int = 0
    accepted: int = 0
    refused: int = 0
    rejected_by_requests: int = 0
    rejected_by_tokens: int = 0
    finished_stop: int = 0
    finished_length: int = 0
    finished_abort: int = 0
    finished_error: int = 0
    worker_losses: int = 0
    prefix_resets: int = 0
    host_prefix_queries: int = 0
    host_prefix_hits: int = 0
    blocks_swapped_out: int = 0
    blocks_swapped_in: int = 0
    preemptions_swapped: int = 0

    def count_step(self, num_computed: int, num_generated: int) -> None:
        """Count a step that computed `num_computed` positions and generated `num_generated` tokens."""
        self.steps += 1
        self.step_tokens[bisect_left(STEP_TOKEN_BUCKETS, num_computed)] += 1
        self.step_tokens_sum += num_computed
        self.generation_tokens += num_generated

    def count_prompt_tokens(self, num_tokens: int, *, cached: bool = False) -> None:
        """Count tokens of a prompt: `cached` ones were found in the prefix index, the others computed."""
        self.prompt_tokens += num_tokens
        if cached:
            self.prompt_tokens_cached += num_tokens

    def count_prefix_query(self, num_tokens: int, num_hits: int) -> None:
        """Count `num_tokens` tokens that were looked up in the prefix index, and those found."""
        self.prefix_queries += num_tokens
        self.prefix_hits += num_hits

    def count_host_prefix_query(self, num_tokens: int, num_hits: int) -> None:
        """Count `num_tokens` tokens that the device did not have, and those found in host memory."""
        self.host_prefix_queries += num_tokens
        self.host_prefix_hits += num_hits

    def count_swaps(self, num_out: int, num_in: int) -> None:
        """Count the blocks that a plan copies to host memory and back."""
        self.blocks_swapped_out += num_out
        self.blocks_swapped_in += num_in

    def count_acceptance(self) -> None:
        """Count a request that was accepted."""
        self.accepted += 1

    def count_refusal(self) -> None:
        """Count a request that was refused, for whatever reason."""
        self.refused += 1

    def count_rejection(self, *, by_requests: bool) -> None:
        """Count a request that found the queue full: of requests, or else of tokens."""
        if by_requests:
            self.rejected_by_requests += 1
        else:
            self.rejected_by_tokens += 1

    def count_preemption(self) -> None:
        """Count a preemption."""
        self.preemptions += 1

    def count_swapped_preemption(self) -> None:
        """Count a preempted sequence whose blocks are kept in host memory. The preemption itself is counted already."""
        self.preemptions_swapped += 1

    def count_finish(self, finish_reason: FinishReason) -> None:
        """Count one sample's end."""
        name = f"finished_{finish_reason.value}"
        setattr(self, name, getattr(self, name) + 1)

    def count_worker_loss(self) -> None:
        """Count a worker that died, hung or failed."""
        self.worker_losses += 1

    def count_prefix_reset(self) -> None:
        """Count a time that all cached blocks were forgotten on demand."""
        self.prefix_resets += 1
