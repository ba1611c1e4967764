"""Every message between Quire's processes. This file is the architecture.

    gateway ──Hello, Submit, Abort, Heartbeat──▶ scheduler ──Configure, StepPlan, Stop──▶ worker
    gateway ◀─Welcome, Accepted, Refused, Progress, Status, UnknownGateway── scheduler
    scheduler ◀─Register, StepResult, Fault, Heartbeat, Configured── worker
    supervisor ◀─Heartbeat── gateway, scheduler, worker

Rules of the file:
- One union a direction, each member tagged by a small integer; encoders and decoders are built once, below.
- Structs are frozen arrays on the wire: fields may only be appended, and any change bumps `VERSION`.
- Nothing untyped travels: no pickle, no method names, no free-form mappings.
- Token ids travel as little-endian int32 bytes (`pack_tokens`), since both ends want arrays.
- `decode_*` raises `ProtocolError` for whatever is not a message, and nothing else.
- Every number has a range and every string a longest length, in its type: NaN and infinity are refused, and no
  value of a peer can overflow an array or upset an order.

Times are seconds. A *position* counts tokens of a sequence from 0 at the first prompt token; an *output position*
counts from 0 at the first token behind the prompt. A *slot* is the index, assigned by the scheduler, under which a
worker keeps a running sequence. A *block* is an index into the worker's pages of KV memory.
"""

import sys
from array import array
from enum import Enum
from typing import Annotated, Any, TypeVar

import msgspec
from msgspec import Meta, Struct

from shared.errors import ProtocolError

VERSION = 5
"""Bumped by every change of the wire; peers with another version are refused at the first message."""

MAX_FRAME = 64 * 1024 * 1024
"""No message is longer than this many bytes; sockets drop a peer that sends more."""

STEP_TOKEN_BUCKETS = (1, 8, 16, 32, 64, 128, 256, 512, 1024, 2048, 4096, 8192, 16384)
"""Upper bounds of the buckets in which `Snapshot.step_tokens` counts steps; what is larger has a bucket of its own."""

MIN_REPETITION_PENALTY, MAX_REPETITION_PENALTY = 1e-30, 1e30
"""A float32 holds them, and logits multiplied or divided by them."""

_INT32 = 2**31 - 1  # as the arrays of tokens, slots and blocks hold it
_INT64 = 2**63 - 1

Count = Annotated[int, Meta(ge=0, le=_INT64)]  # of events since a start; an id
Index = Annotated[int, Meta(ge=0, le=_INT32)]  # a token id, position, slot, block or sample, or how many of these
Size = Annotated[int, Meta(ge=1, le=_INT32)]
Seconds = Annotated[float, Meta(ge=0, le=1e9)]
ThreadSeconds = Annotated[float, Meta(ge=0, le=1e15)]  # of all threads of a process, added up
Time = Annotated[float, Meta(ge=0, le=1e11)]  # of the wall clock
Finite = Annotated[float, Meta(ge=-3.4e38, le=3.4e38)]  # a float32 holds it
Name = Annotated[str, Meta(max_length=4096)]
Detail = Annotated[str, Meta(max_length=2**20)]  # for people

OptionalIndex = Annotated[
    int, Meta(ge=-1, le=_INT32)
]  # a number of alternatives, or a sample; -1 is said where it is used
Share = Annotated[float, Meta(ge=0, le=1)]
Bias = Annotated[float, Meta(ge=-1000, le=1000)]  # added to logits; far more than the API takes
RepetitionPenalty = Annotated[float, Meta(ge=MIN_REPETITION_PENALTY, le=MAX_REPETITION_PENALTY)]
TokenIds = Annotated[list[Index], Meta(max_length=2**20)]
LogitBias = Annotated[list[tuple[Index, Bias]], Meta(max_length=2**20)]


class FinishReason(Enum):
    """Why a sequence ended."""

    STOP = "stop"  # an end-of-sequence or stop token was sampled
    LENGTH = "length"  # max_tokens, or the end of the context
    ABORT = "abort"  # the gateway asked for it, or is gone
    ERROR = "error"  # the engine could not go on with it


class Refusal(Enum):
    """Why a `Submit` was not accepted."""

    QUEUE_FULL = "queue_full"  # come back later
    TOO_LONG = "too_long"  # could never fit, now or later
    DRAINING = "draining"  # this engine takes no new work
    INVALID = "invalid"  # breaks a rule of this protocol
    NOT_READY = "not_ready"  # no worker has come yet


class Epoch(Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """Names one configuration of a worker group; results of another epoch are dropped."""

    boot_id: Name  # drawn anew by each scheduler process
    count: Count  # grows each time the group is (re)configured


class Sampling(Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """What scheduler and worker need to know to choose a sequence's tokens and its end.

    Text (stop strings) is not here: the gateway watches for it and aborts.
    """

    max_tokens: Index  # output tokens at most; 0 only scores the prompt
    seed: Annotated[int, Meta(ge=0)]  # 64 bits; noise is Philox(key=seed, counter=(token, output position, sample))
    temperature: Annotated[float, Meta(ge=0, le=1e30)] = 1.0  # 0 is greedy
    top_p: Annotated[float, Meta(gt=0, le=1)] = 1.0  # 1 is off
    top_k: Index = 0  # 0 is off
    min_p: Share = 0.0  # 0 is off
    presence_penalty: Bias = 0.0  # over output tokens
    frequency_penalty: Bias = 0.0  # over output tokens
    repetition_penalty: RepetitionPenalty = 1.0  # over prompt and output tokens
    logit_bias: LogitBias = []  # (token id, added to its logit)
    min_tokens: Index = 0  # stop tokens cannot be sampled before so many output tokens
    stop_token_ids: TokenIds = []  # sampling one ends the sequence; end-of-sequence ids included unless ignored
    logprobs: OptionalIndex = -1  # alternatives reported for each output token; -1: not even the token's own
    prompt_logprobs: OptionalIndex = -1  # the same for the tokens of the prompt; such a request takes no prefix hits


class TokenLogprobs(Struct, frozen=True, array_like=True, forbid_unknown_fields=True, gc=False):
    """Log-probabilities at one position, of the model's own distribution (before bias, penalties and temperature)."""

    logprob: Finite  # of the token that stands there
    rank: Index  # of that token, 1 being the likeliest
    top_ids: list[Index]  # the likeliest tokens, best first
    top_logprobs: list[Finite]  # theirs


# every process → those that watch it


class ProcessStats(Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """The state of a process by its own account. Peers judge by it whether it lives (`shared.liveness`)."""

    busy_seconds: Seconds = 0.0  # seconds that its loop has spent in the present turn; 0 while it waits for messages
    cpu_seconds: ThreadSeconds = 0.0  # CPU seconds used so far, by all threads
    cpu_wait_seconds: ThreadSeconds = 0.0  # seconds that its threads have waited for a CPU so far; 0 if not known


class Heartbeat(Struct, frozen=True, array_like=True, tag=4, forbid_unknown_fields=True):
    """A process lives. A thread of its own sends it, over a socket of its own, whatever the loop does."""

    identity: Name  # identity of the socket that the process talks over; its role, if it is for the supervisor
    process: ProcessStats


# gateway → scheduler


class Hello(Struct, frozen=True, array_like=True, tag=1, forbid_unknown_fields=True):
    """A gateway's first message on a new socket."""

    version: Count
    identity: Name  # the socket's identity, for logs


class Submit(Struct, frozen=True, array_like=True, tag=2, forbid_unknown_fields=True):
    """Run one request. Answered at once, by `Accepted` or `Refused`; then comes progress, to one finish a sample."""

    id: Count  # of this attempt, never used again on the same socket
    tokens: bytes  # int32: the prompt, and behind `prompt_len` the output so far
    prompt_len: Size
    sampling: Sampling
    n: Size = 1  # samples wanted; more than one only without output
    sample: Index = 0  # index of the first sample
    priority: Annotated[int, Meta(ge=-(2**63), le=_INT64)] = 0  # lower is served first
    arrival: Time = 0.0  # when the gateway took it in; orders the queue across gateways
    samples_before: Index = (
        0  # samples of the same user's request before the first of these; others' may be served between
    )


class Abort(Struct, frozen=True, array_like=True, tag=3, forbid_unknown_fields=True):
    """Stop a request, or one sample of it. Idempotent; unknown ids are ignored; nothing is answered."""

    id: Count
    sample: OptionalIndex = -1  # -1: all of them


# scheduler → gateway


class ModelInfo(Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """What a worker knows of the model it loaded."""

    name: Name  # the folder or name it was loaded from
    architecture: Name  # as in config.json
    dtype: Name  # of the weights in memory
    max_positions: Count  # the longest context that the model was made for
    vocab_size: Index  # logits per position
    fingerprint: Name  # equal fingerprints give equal tokens
    weights_digest: Name = ""  # of the weight files: an engine's workers must agree; empty: not known
    text_digest: Name = ""  # of the files that tell text from tokens: a gateway's must be the same; empty: not known


class Snapshot(Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """State of one engine: gauges as they are, counters since the scheduler's start."""

    running: Count = 0  # sequences with a slot
    waiting: Count = 0  # sequences without one
    waiting_tokens: Count = 0  # their tokens
    blocks: Count = 0  # of the pool
    blocks_free: Count = 0  # with no holder, cached ones included
    blocks_cached: Count = 0  # published in the prefix index, held or not
    tokens_held: Count = 0  # positions handed out in held blocks (shared ones once); shows internal waste
    in_flight: Count = 0  # plans sent whose result is not back
    steps: Count = 0  # counter: results committed
    preemptions: Count = 0  # counter
    prefix_queries: Count = 0  # counter: tokens looked up in the prefix index
    prefix_hits: Count = 0  # counter: tokens found there
    prompt_tokens: Count = 0  # counter: prompt tokens computed or found
    generation_tokens: Count = 0  # counter
    accepted: Count = 0  # counter: requests
    refused: Count = 0  # counter: requests
    finished_stop: Count = 0  # counter: sequences
    finished_length: Count = 0  # counter: sequences
    finished_abort: Count = 0  # counter: sequences
    finished_error: Count = 0  # counter: sequences
    worker_losses: Count = 0  # counter: epochs that ended in a dead, hung or faulty worker
    block_size: Count = 0  # tokens in a block
    waiting_deferred: Count = 0  # of `waiting`: for a worker, a trial or their request's prompt, not for room
    prompt_tokens_cached: Count = 0  # counter: of `prompt_tokens`, those found in the prefix index
    step_tokens: list[Count] = []  # counter: steps, by the tokens computed in them; see `STEP_TOKEN_BUCKETS`
    step_tokens_sum: Count = 0  # counter: tokens computed in all steps
    tokens_per_second: Annotated[float, Meta(ge=0, le=1e12)] = 0.0  # generated, over the last seconds
    rejected_by_requests: Count = 0  # counter: of `refused`, those that found too many requests waiting
    rejected_by_tokens: Count = 0  # counter: of `refused`, those that found too many tokens waiting
    prefix_caching: bool = False  # whether there is a prefix index at all
    max_model_len: Count = 0  # tokens of one sequence, at most


class Welcome(Struct, frozen=True, array_like=True, tag=1, forbid_unknown_fields=True):
    """Answers `Hello` as soon as workers are configured, and is sent again when they are configured anew."""

    version: Count
    engine: Name  # name of the engine, for metrics' labels
    boot_id: Name  # of the scheduler process
    model: ModelInfo
    max_model_len: Index  # tokens of prompt and output together, after fitting the pool
    max_num_seqs: Index


class SchedulingInfo(Struct, frozen=True, array_like=True, forbid_unknown_fields=True, gc=False):
    """The way of a sequence to its slot."""

    queued_seconds: Seconds  # from the acceptance of its request to its first admission, by the scheduler's clock
    preemptions: Count  # so far


class ProgressRow(Struct, frozen=True, array_like=True, forbid_unknown_fields=True, gc=False):
    """News of one sequence."""

    id: Count  # of the `Submit`
    sample: Index
    position: Index  # output position of the first of `tokens`; whatever does not continue the stream is not applied
    tokens: list[Index]
    logprobs: list[TokenLogprobs] | None = None  # one for each of `tokens`
    prompt_logprobs: list[TokenLogprobs] | None = None  # of the next prompt positions, in order, from position 1
    finish_reason: FinishReason | None = None  # the last row of this sequence
    cached_tokens: Index = 0  # prompt tokens found in the prefix index when it was first admitted
    detail: Detail = ""  # when `finish` is ERROR
    scheduling: SchedulingInfo | None = None  # when it has changed since the sequence's last row


class Progress(Struct, frozen=True, array_like=True, tag=2, forbid_unknown_fields=True):
    """All news of one step for one gateway."""

    rows: list[ProgressRow]


class Refused(Struct, frozen=True, array_like=True, tag=3, forbid_unknown_fields=True):
    """A `Submit` that was not accepted; nothing of it remains."""

    id: Count
    reason: Refusal
    detail: Detail
    retry_after: Seconds = 0.0  # a guess, when the reason passes


class Status(Struct, frozen=True, array_like=True, tag=4, forbid_unknown_fields=True):
    """The scheduler's heartbeat, sent by its step loop."""

    ready: bool  # steps can be made: workers are there and none is overdue
    draining: bool
    snapshot: Snapshot
    process: ProcessStats = ProcessStats()  # the scheduler's


class UnknownGateway(Struct, frozen=True, array_like=True, tag=6, forbid_unknown_fields=True):
    """Answers any message of a gateway that said no Hello, or was given up: nothing of its requests remains."""


class Accepted(Struct, frozen=True, array_like=True, tag=5, forbid_unknown_fields=True):
    """Each of these `Submit`s is in the queue, and will not be refused any more, however long it waits there."""

    ids: list[Count]


# scheduler → worker


class Configure(Struct, frozen=True, array_like=True, tag=1, forbid_unknown_fields=True):
    """Begin an epoch: drop all sequences, and have KV memory and slots of these sizes."""

    epoch: Epoch
    block_size: Size  # tokens
    num_blocks: Size
    max_num_seqs: Size  # slots
    max_model_len: Size
    max_num_batched_tokens: Size


class NewSequence(Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """A sequence enters a slot (new, or resumed: the two differ in numbers only)."""

    slot: Index
    tokens: bytes  # int32, all that are known
    prompt_len: Index
    blocks: list[Index]  # its block table so far
    sampling: Sampling
    sample: Index


class Fork(Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """Slots that begin as copies of `parent` (tokens, table, sampling), each with its own sample index.

    The parent has a sampling row in the same plan; each child samples from that row's logits too.
    """

    parent: Index  # slot
    children: list[tuple[Index, Index]]  # (slot, sample)


class TableWrite(Struct, frozen=True, array_like=True, forbid_unknown_fields=True, gc=False):
    """`table[slot][index : index + len(blocks)] = blocks`."""

    slot: Index
    index: Index
    blocks: list[Index]


class Row(Struct, frozen=True, array_like=True, forbid_unknown_fields=True, gc=False):
    """Compute positions `start` to `start + count - 1` of a slot's sequence.

    Their tokens are in the slot already: given with the sequence, or sampled there by an earlier step.
    """

    slot: Index
    start: Index
    count: Index
    samples: Index  # tokens to sample after the last of them: 0 or 1


class StepPlan(Struct, frozen=True, array_like=True, tag=2, forbid_unknown_fields=True):
    """One step: what changed since the last plan, and the rows to compute.

    Applied in this order: released, new, forks' slots, writes, copies, then the forward pass over all rows together.
    """

    epoch: Epoch
    step: Count  # consecutive within an epoch, from 0
    rows: list[Row]
    new_sequences: list[NewSequence] = []
    forks: list[Fork] = []
    table_writes: list[TableWrite] = []
    block_copies: list[
        tuple[Index, Index]
    ] = []  # (source block, destination block), all layers; no block is on both sides
    released_slots: list[Index] = []  # slots no longer in use


class Stop(Struct, frozen=True, array_like=True, tag=3, forbid_unknown_fields=True):
    """End the process in good order."""


# worker → scheduler


class Register(Struct, frozen=True, array_like=True, tag=1, forbid_unknown_fields=True):
    """A worker rank's first message on a new socket: weights are loaded and warm."""

    version: Count
    identity: Name  # the socket's identity, for logs
    rank: Index
    world_size: Index  # ranks of the group
    pid: Index  # on the worker's host
    device: Name
    model: ModelInfo
    kv_bytes_per_token: Count  # all layers, keys and values
    kv_memory: Count  # bytes that may hold KV
    step_seconds: Seconds  # measured: a step's fixed cost
    token_seconds: Seconds  # measured: cost of one more token in a step


class SampledRow(Struct, frozen=True, array_like=True, forbid_unknown_fields=True, gc=False):
    """What a slot gave in a step: a sampling row, a fork's child, or a row with prompt log-probabilities."""

    slot: Index
    tokens: list[Index]
    logprobs: list[TokenLogprobs] | None = None  # one for each of `tokens`, if wanted
    prompt_logprobs: list[TokenLogprobs] | None = None  # of positions start+1 .. min(start+count, prompt_len-1)


class StepResult(Struct, frozen=True, array_like=True, tag=2, forbid_unknown_fields=True):
    """Outcome of the plan of the same epoch and step."""

    epoch: Epoch
    step: Count
    rows: list[SampledRow]
    seconds: Seconds = 0.0  # the worker spent on it


class Fault(Struct, frozen=True, array_like=True, tag=3, forbid_unknown_fields=True):
    """A step raised; the process ends itself after this message, since its state is unknown."""

    epoch: Epoch
    step: Count
    detail: Detail  # the traceback


class Configured(Struct, frozen=True, array_like=True, tag=5, forbid_unknown_fields=True):
    """Answers `Configure`: plans of this epoch can come."""

    epoch: Epoch


GatewayToScheduler = Hello | Submit | Abort | Heartbeat
SchedulerToGateway = Welcome | Progress | Refused | Status | Accepted | UnknownGateway
SchedulerToWorker = Configure | StepPlan | Stop
WorkerToScheduler = Register | StepResult | Fault | Heartbeat | Configured
ToSupervisor = Heartbeat


class _SubmitId(Struct, frozen=True, array_like=True, tag=2):
    """The beginning of a `Submit`; whatever comes behind it is not looked at."""

    id: Count


_encoder = msgspec.msgpack.Encoder()
_from_gateway = msgspec.msgpack.Decoder(GatewayToScheduler)
_to_gateway = msgspec.msgpack.Decoder(SchedulerToGateway)
_to_worker = msgspec.msgpack.Decoder(SchedulerToWorker)
_from_worker = msgspec.msgpack.Decoder(WorkerToScheduler)
_submit_id = msgspec.msgpack.Decoder(_SubmitId)
_to_supervisor = msgspec.msgpack.Decoder(ToSupervisor)

M = TypeVar("M")


def encode(message: Struct) -> bytes:
    """Bytes of any message of this file."""
    return _encoder.encode(message)


def decode_from_gateway(data: bytes) -> GatewayToScheduler:
    """A message that a scheduler got from a gateway."""
    return _decode(_from_gateway, data)


def id_of_submit(data: bytes) -> int | None:
    """Return the id of a `Submit` that cannot be decoded as a whole, so that it can be refused; None if it has none."""
    try:
        return _decode(_submit_id, data).id
    except ProtocolError:
        return None


def decode_to_gateway(data: bytes) -> SchedulerToGateway:
    """A message that a gateway got from a scheduler."""
    return _decode(_to_gateway, data)


def decode_to_worker(data: bytes) -> SchedulerToWorker:
    """A message that a worker got from a scheduler."""
    return _decode(_to_worker, data)


def decode_from_worker(data: bytes) -> WorkerToScheduler:
    """A message that a scheduler got from a worker."""
    return _decode(_from_worker, data)


def decode_to_supervisor(data: bytes) -> ToSupervisor:
    """A message that a supervisor got from a service."""
    return _decode(_to_supervisor, data)


def _decode(decoder: "msgspec.msgpack.Decoder[M]", data: bytes) -> M:
    try:
        return decoder.decode(data)
    except (msgspec.DecodeError, RecursionError) as error:  # ValidationError is a DecodeError
        raise ProtocolError(f"not a message of protocol version {VERSION}: {error}") from error


def pack_tokens(tokens: Any) -> bytes:
    """Token ids (an int32 `array` or any iterable of ints) as little-endian int32 bytes."""
    ids = tokens if isinstance(tokens, array) and tokens.typecode == "i" else array("i", tokens)
    if sys.byteorder == "big":
        ids = array("i", ids)
        ids.byteswap()
    return ids.tobytes()


def unpack_tokens(data: bytes) -> "array[int]":
    """The token ids in `data`, as an int32 `array`; ProtocolError if the length is not a multiple of four."""
    if len(data) % 4:
        raise ProtocolError(f"token bytes must come in fours, got {len(data)}")
    ids = array("i")
    ids.frombytes(data)
    if sys.byteorder == "big":
        ids.byteswap()
    return ids
