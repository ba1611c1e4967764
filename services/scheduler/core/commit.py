"""`commit`: apply a step's result.

A plan whose result is back no longer holds the sequences it named, even if they have stopped meanwhile. The tokens of a
sequence that has finished meanwhile are dropped. Those of a sequence that was preempted meanwhile count, since sampling
them again would give the same tokens for twice the work.
"""

from services.scheduler.core.block_manager import BlockManager
from services.scheduler.core.counters import Counters
from services.scheduler.core.plan_builder import InFlightPlan
from services.scheduler.core.queues import Queues
from services.scheduler.core.sequence import Sequence
from shared.errors import ProtocolError
from shared.protocol import FinishReason, ProgressRow, Row, SampledRow, StepResult

SampledRows = list[SampledRow | None]


def match_sampled_rows(plan: InFlightPlan, result: StepResult) -> SampledRows:
    """Return the result's row for each row of the plan, None where it has none.

    Raise ProtocolError if a sampling row has no token, or more than one.
    """
    by_slot = {sampled_row.slot: sampled_row for sampled_row in result.rows}
    sampled_rows: SampledRows = []
    for row in plan.rows:
        sampled_row = by_slot.get(row.slot)
        if row.samples and (sampled_row is None or len(sampled_row.tokens) != row.samples):
            raise ProtocolError(f"step {plan.step} sampled in slot {row.slot}, but its result has no token for it")
        sampled_rows.append(sampled_row)
    return sampled_rows


def commit(
    plan: InFlightPlan, sampled_rows: SampledRows, queues: Queues, block_manager: BlockManager, counters: Counters
) -> list[ProgressRow]:
    """Advance the plan's sequences, finish those that end, free what no plan names any more. Return the new output."""
    progress_rows: list[ProgressRow] = []
    block_manager.unpin(plan.pinned_blocks, plan.host_blocks)
    for row, sequence, sampled_row in zip(plan.rows, plan.sequences, sampled_rows, strict=True):
        progress, start = sequence.progress, row.start
        end = start + row.count
        progress.commit(end)
        if sequence.finish_reason is None:
            if end >= sequence.table.publish_at:
                block_manager.publish(sequence)
            if start < sequence.prompt_len:
                counters.count_prompt_tokens(sequence.stats.count_prompt_up_to(min(end, sequence.prompt_len)))
            if sampled_row is not None or end == progress.max_num_tokens:
                progress_row = _advance(row, sequence, sampled_row)
                if progress_row is not None:
                    progress_rows.append(progress_row)
                    if (reason := progress_row.finish_reason) is FinishReason.ERROR:  # the others have the same prompt
                        progress_rows += queues.finish_unstarted(sequence.request, reason, detail=progress_row.detail)
                    if reason is not None:
                        queues.finish(sequence, reason)
        if queues.stopping and sequence in queues.stopping and not progress.in_flight:
            queues.finish_stopping(sequence)
    counters.count_step(plan.num_tokens, sum([len(progress_row.tokens) for progress_row in progress_rows]))
    return progress_rows


def _advance(row: Row, sequence: Sequence, sampled_row: SampledRow | None) -> ProgressRow | None:
    """Append the sampled token. Return the row for the gateway, or None if it would be empty."""
    position = len(sequence.tokens) - sequence.prompt_len
    stats = sequence.stats
    tokens: list[int] = []
    finish_reason = logprobs = prompt_logprobs = None
    if sampled_row is not None and sampled_row.error:
        finish_reason = FinishReason.ERROR
    elif sampled_row is not None and row.samples:
        tokens, logprobs = sampled_row.tokens, sampled_row.logprobs
        finish_reason = sequence.append_token(tokens[0])
    elif sequence.progress.num_computed == sequence.progress.max_num_tokens:  # the prompt was only scored
        finish_reason = FinishReason.LENGTH
    if sampled_row is not None and sampled_row.prompt_logprobs and sequence.sampling.prompt_logprobs >= 0:
        prompt_logprobs = stats.take_unsent(row.start, sampled_row.prompt_logprobs) or None
    if not (tokens or prompt_logprobs or finish_reason):
        return None
    return ProgressRow(
        sequence.request.id,
        sequence.sample,
        position,
        tokens,
        logprobs,
        prompt_logprobs,
        finish_reason,
        stats.num_cached_tokens,
        sampled_row.error if sampled_row is not None else "",
        sequence.take_scheduling() if stats.scheduling_changed else None,
    )
