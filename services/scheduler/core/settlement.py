"""`settle`: a step's result takes effect.

Everything that the plan named is let go of, whether or not its sequence is still wanted; tokens of a sequence that
ended meanwhile are dropped. Sampled tokens of a sequence that was preempted meanwhile count: they would be the same
again, but work is never done twice that need not be.
"""

from services.scheduler.core.draft import Flight
from services.scheduler.core.memory import Memory
from services.scheduler.core.roster import Counters, Roster
from services.scheduler.core.sequence import Sequence, State
from shared.errors import ProtocolError
from shared.protocol import FinishReason, ProgressRow, Row, SampledRow, StepResult, TokenLogprobs

Answers = list[SampledRow | None]


def match(flight: Flight, result: StepResult) -> Answers:
    """What the result says of each row of the plan; ProtocolError if a sampling row has not got its one token."""
    by_slot = {answer.slot: answer for answer in result.rows}
    answers: Answers = [by_slot.get(row.slot) for row in flight.rows]
    for row, answer in zip(flight.rows, answers, strict=True):
        if row.samples and (answer is None or len(answer.tokens) != row.samples):
            raise ProtocolError(f"step {flight.step} sampled in slot {row.slot}, but its result has no token for it")
    return answers


def settle(flight: Flight, answers: Answers, roster: Roster, memory: Memory, counters: Counters) -> list[ProgressRow]:
    """Move sequences on, end those that are at their end, free what nothing names any more. Returns the news."""
    news: list[ProgressRow] = []
    memory.unpin(flight.pins)
    for row, sequence, answer in zip(flight.rows, flight.sequences, answers, strict=True):
        sequence.in_flight -= 1
        sequence.computed = row.start + row.count
        if sequence.finish_reason is None:
            if sequence.computed >= sequence.next_full:
                memory.publish(sequence)
            if sequence.prompt_seen < sequence.prompt_len:
                _count_prompt(sequence, counters)
            if answer is not None or sequence.computed == sequence.limit:
                told = _advance(row, sequence, answer)
                if told is not None:
                    news.append(told)
                    if told.finish_reason is not None:
                        roster.end(sequence, told.finish_reason)
        if not sequence.in_flight and sequence.state is State.DRAINING:
            roster.depart(sequence)
    counters.stepped(flight.tokens)
    counters.generation_tokens += sum([len(told.tokens) for told in news])
    return news


def _advance(row: Row, sequence: Sequence, answer: SampledRow | None) -> ProgressRow | None:
    """Append what was sampled, and see whether that is the end."""
    output_len = len(sequence.tokens) - sequence.prompt_len
    tokens: list[int] = []
    finish = logprobs = prompt_logprobs = None
    if answer is not None and row.samples:
        tokens, logprobs = answer.tokens, answer.logprobs
        sequence.tokens.append(tokens[0])
        if tokens[0] in sequence.stops:
            finish = FinishReason.STOP
        elif len(sequence.tokens) == sequence.limit:
            finish = FinishReason.LENGTH
    elif sequence.computed == sequence.limit:  # only scored
        finish = FinishReason.LENGTH
    if answer is not None and answer.prompt_logprobs:
        prompt_logprobs = _unsent(row, sequence, answer.prompt_logprobs)
    if not (tokens or prompt_logprobs or finish):
        return None
    request, cached, admission = sequence.request, sequence.cached_tokens, sequence.scheduling
    if admission is not None:
        sequence.scheduling = None  # sent once
    return ProgressRow(
        request.id, sequence.sample, output_len, tokens, logprobs, prompt_logprobs, finish, cached, "", admission
    )


def _unsent(row: Row, sequence: Sequence, scores: list[TokenLogprobs]) -> list[TokenLogprobs] | None:
    """Scores of positions start + 1 and on, less those delivered before a preemption."""
    if sequence.sampling.prompt_logprobs < 0:
        return None
    fresh = scores[max(sequence.prompt_logprobs_sent - row.start, 0) :]
    sequence.prompt_logprobs_sent += len(fresh)
    return fresh or None


def _count_prompt(sequence: Sequence, counters: Counters) -> None:
    seen = min(sequence.computed, sequence.prompt_len)
    if seen > sequence.prompt_seen:
        counters.prompt_tokens += seen - sequence.prompt_seen
        sequence.prompt_seen = seen
