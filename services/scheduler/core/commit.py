"""`commit`: a step's result takes effect.

A plan that is back no longer holds the sequences it named, whether or not they are still wanted. The tokens of a
sequence that has finished meanwhile are dropped. Those of a sequence that was preempted meanwhile count: to sample
them again would give the same tokens, but cost the work twice.
"""

from services.scheduler.core.counters import Counters
from services.scheduler.core.memory import Memory
from services.scheduler.core.plan_builder import InFlightPlan
from services.scheduler.core.queues import Queues
from services.scheduler.core.sequence import Sequence
from shared.errors import ProtocolError
from shared.protocol import FinishReason, ProgressRow, Row, SampledRow, StepResult

Answers = list[SampledRow | None]


def match_answers(plan: InFlightPlan, result: StepResult) -> Answers:
    """Return the result's row for each row of the plan, None where it has none.

    Raise ProtocolError if a sampling row has not got its one token.
    """
    by_slot = {answer.slot: answer for answer in result.rows}
    answers: Answers = []
    for row in plan.rows:
        answer = by_slot.get(row.slot)
        if row.samples and (answer is None or len(answer.tokens) != row.samples):
            raise ProtocolError(f"step {plan.step} sampled in slot {row.slot}, but its result has no token for it")
        answers.append(answer)
    return answers


def commit(
    plan: InFlightPlan, answers: Answers, queues: Queues, memory: Memory, counters: Counters
) -> list[ProgressRow]:
    """Move sequences on, finish those that are at their end, free what no plan names any more. Return the news."""
    news: list[ProgressRow] = []
    memory.unpin(plan.pinned_blocks)
    for row, sequence, answer in zip(plan.rows, plan.sequences, answers, strict=True):
        progress, start = sequence.progress, row.start
        end = start + row.count
        progress.commit(end)
        if sequence.finish_reason is None:
            if end >= sequence.table.publish_at:
                memory.publish(sequence)
            if start < sequence.prompt_len:
                counters.count_prompt(sequence.stats.count_prompt(min(end, sequence.prompt_len)))
            if answer is not None or end == progress.max_num_tokens:
                progress_row = _advance(row, sequence, answer)
                if progress_row is not None:
                    news.append(progress_row)
                    if progress_row.finish_reason is not None:
                        queues.finish(sequence, progress_row.finish_reason)
        if queues.stopping and sequence in queues.stopping and not progress.in_flight:
            queues.finish_stopping(sequence)
    counters.count_step(plan.num_tokens, sum([len(progress_row.tokens) for progress_row in news]))
    return news


def _advance(row: Row, sequence: Sequence, answer: SampledRow | None) -> ProgressRow | None:
    """Append the sampled token. Return what there is to tell, or None if that is nothing."""
    position = len(sequence.tokens) - sequence.prompt_len
    stats = sequence.stats
    tokens: list[int] = []
    finish_reason = logprobs = prompt_logprobs = None
    if answer is not None and row.samples:
        tokens, logprobs = answer.tokens, answer.logprobs
        finish_reason = sequence.append_token(tokens[0])
    elif sequence.progress.num_computed == sequence.progress.max_num_tokens:  # the prompt was only scored
        finish_reason = FinishReason.LENGTH
    if answer is not None and answer.prompt_logprobs and sequence.sampling.prompt_logprobs >= 0:
        prompt_logprobs = stats.take_unsent(row.start, answer.prompt_logprobs) or None
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
        "",
        None if stats.scheduling is None else stats.take_scheduling(),
    )
