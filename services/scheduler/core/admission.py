"""Whether a `Submit` is accepted: at once, with a reason, and never for what could not be served.

Whether it fits is judged a sequence at a time, since the samples of one request need not run together; the queue's
length counts them all. A resubmission (a request that comes with output) is never refused for load, since somebody is
in the middle of reading it.
"""

from array import array

from msgspec import Struct

from services.scheduler.core.limits import Limits
from shared.errors import ProtocolError
from shared.protocol import Refusal, Refused, Submit, unpack_tokens


class Load(Struct, frozen=True):
    """How things stand when the request comes."""

    waiting: int  # samples, those included that are no sequences yet
    waiting_tokens: int
    draining: bool
    known: bool  # a request of this id is still there
    retry_after: float  # seconds

    def has_too_many_requests(self, samples: int, limits: Limits) -> bool:
        """Return whether a new request of so many samples is refused for those that wait, however short they are.

        One request alone always has room: it could never come in otherwise.
        """
        return self.waiting > 0 and self.waiting + samples > limits.max_queued_requests


def judge(submit: Submit, limits: Limits, load: Load) -> "Refused | array[int]":
    """The tokens of a request that is accepted, else the refusal."""
    try:
        tokens = unpack_tokens(submit.tokens)
    except ProtocolError as error:
        return Refused(submit.id, Refusal.INVALID, str(error))
    if fault := _fault(submit, tokens, limits, load):
        return Refused(submit.id, Refusal.INVALID, fault)
    wanted = submit.prompt_len + submit.sampling.max_tokens
    if wanted > limits.max_model_len:
        detail = f"{submit.prompt_len} tokens of prompt and {submit.sampling.max_tokens} of output"
        detail += f" are more than the {limits.max_model_len} of the context"
        return Refused(submit.id, Refusal.TOO_LONG, detail)
    if len(tokens) > submit.prompt_len:
        return tokens
    if load.draining:
        return Refused(submit.id, Refusal.DRAINING, "the engine is shutting down")
    if full := _overload(submit.n, tokens, limits, load):
        return Refused(submit.id, Refusal.QUEUE_FULL, full, load.retry_after)
    return tokens


def _fault(submit: Submit, tokens: "array[int]", limits: Limits, load: Load) -> str:
    output = len(tokens) - submit.prompt_len
    faults = {
        "the id is in use": load.known,
        f"prompt_len is {submit.prompt_len}, but there are {len(tokens)} tokens": output < 0 or submit.prompt_len < 1,
        "token ids must not be negative": min(tokens, default=0) < 0,
        f"{output} tokens of output leave none of max_tokens={submit.sampling.max_tokens}": 0
        < output
        >= submit.sampling.max_tokens,
        f"n must be at least 1, got {submit.n}": submit.n < 1,
        "n must be 1 when there is output already": submit.n > 1 and output > 0,
        "a priority needs --scheduling-policy priority": bool(submit.priority) and limits.policy == "fcfs",
    }
    return next((fault for fault, is_so in faults.items() if is_so), "")


def _overload(samples: int, tokens: "array[int]", limits: Limits, load: Load) -> str:
    if load.has_too_many_requests(samples, limits):
        more = f", and {samples} more are too many" if samples > 1 else ""
        return f"{load.waiting} requests are waiting already" + more
    waiting = load.waiting_tokens
    if limits.max_queued_tokens and waiting and waiting + len(tokens) > limits.max_queued_tokens:
        return f"requests of {waiting} tokens are waiting already"
    return ""
