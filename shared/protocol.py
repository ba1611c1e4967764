"""Every message between Quire's processes. This file is the architecture.

    gateway ──Hello, Submit, Abort, ResetPrefixCache, AddAdapter, RemoveAdapter, Heartbeat──▶ scheduler
    gateway ◀─Welcome, Accepted, Refused, Progress, Status, PrefixCacheReset, AdapterAnswer, UnknownGateway── scheduler
    scheduler ──Configure, LoadAdapter, UnloadAdapter, StepPlan, Stop──▶ worker
    scheduler ◀─Register, StepResult, Fault, Heartbeat, Configured, AdapterLoaded, AdapterRefused, Leave── worker
    supervisor ◀─Heartbeat── gateway, scheduler, worker

Rules of the file:
- Each direction has one union of structs, each tagged by a small integer. Encoders and decoders are built once, below.
- Structs are arrays on the wire. Fields may only be appended, and any change bumps `VERSION`.
- Nothing untyped is sent: no pickle, no method names, no free-form mappings.
- Token ids are sent as little-endian int32 bytes (`pack_tokens`), since both ends keep them in arrays.
- `decode_*` raises `ProtocolError` for anything that is not a message, and nothing else.
- Every number has a range and every string a maximum length, in its type. NaN and infinity are refused, and no value
  from a peer can overflow an array or break an ordering.

Times are seconds. A *position* is the index of a token in a sequence, 0 being the first prompt token; an *output
position* is the index in the output, 0 being the first token after the prompt. A *slot* is the index under which a
worker keeps a running sequence; the scheduler assigns it. A *block* is an index into the worker's pages of KV memory,
and a *host block* one into its pages of host memory, to which blocks are swapped. An *adapter slot* is the index under
which a worker keeps an adapter (LoRA) that rows use; the scheduler assigns it as well.
"""

import sys
from array import array
from collections.abc import Collection
from enum import Enum
from typing import Annotated, Any, TypeVar

import msgspec
from msgspec import Meta, Struct

from shared.errors import ProtocolError

VERSION = 13
"""Every change of the wire bumps it. A peer with another version is refused at its first message."""

MAX_FRAME = 64 * 1024 * 1024
"""Maximum length of a message in bytes. Sockets disconnect a peer that sends a longer one."""

MAX_LOGIT_BIAS = 16_384
"""Maximum number of tokens with a bias. Each process that they pass through spends some ten milliseconds on them."""

MAX_STOP_TOKEN_IDS = 1_024
"""Maximum number of stop tokens that a user names. A model has as many end-of-sequence ids at most."""

MAX_VOCAB_SIZE = 2**20
"""Tokens of the largest vocabulary of which a request may name those that are allowed."""

MAX_BAD_WORDS = 128
"""Maximum number of sequences of tokens that an output must not have."""

MAX_BAD_WORD_TOKENS = 64
"""Maximum length of each: the worker compares them with the output in each step."""

MAX_LOGPROB_TOKEN_IDS = 128
"""Maximum number of tokens whose log-probabilities are reported at each output token because a user names them."""

MAX_CACHE_SALT = 128
"""Maximum number of characters of a `cache_salt`."""

MAX_SHORT_TEXT = 4096
"""Maximum number of characters of a `ShortText`, and so of an adapter's name or path."""

STEP_TOKEN_BUCKETS = (1, 8, 16, 32, 64, 128, 256, 512, 1024, 2048, 4096, 8192, 16384)
"""Upper bounds of the buckets of `Snapshot.step_tokens`. One more bucket counts the larger steps."""

MIN_REPETITION_PENALTY, MAX_REPETITION_PENALTY = 1e-30, 1e30
"""Bounds within which float32 holds the penalty and the logits multiplied or divided by it."""

_INT32 = 2**31 - 1  # the type of the arrays of tokens, slots and blocks
_INT64 = 2**63 - 1

Count = Annotated[int, Meta(ge=0, le=_INT64)]  # a counter, an id or a version
Index = Annotated[int, Meta(ge=0, le=_INT32)]  # a token id, position, slot, block or sample, or a number of these
OptionalIndex = Annotated[int, Meta(ge=-1, le=_INT32)]  # an index or a number; each field says what -1 means
Size = Annotated[int, Meta(ge=1, le=_INT32)]
Seconds = Annotated[float, Meta(ge=0, le=1e9)]
CpuSeconds = Annotated[float, Meta(ge=0, le=1e15)]  # summed over all threads of a process
WallTime = Annotated[float, Meta(ge=0, le=1e11)]  # seconds since the epoch
Float32 = Annotated[float, Meta(ge=-3.4e38, le=3.4e38)]  # finite
ShortText = Annotated[str, Meta(max_length=MAX_SHORT_TEXT)]  # a name, an identity or a digest
RequestId = Annotated[str, Meta(max_length=256)]  # the id that a client sees, by which all services log its request
LongText = Annotated[str, Meta(max_length=2**20)]  # an explanation for people
Probability = Annotated[float, Meta(ge=0, le=1)]
Bias = Annotated[float, Meta(ge=-1000, le=1000)]  # added to logits; the API's own range is much smaller
RepetitionPenalty = Annotated[float, Meta(ge=MIN_REPETITION_PENALTY, le=MAX_REPETITION_PENALTY)]
StopTokenIds = Annotated[list[Index], Meta(max_length=2 * MAX_STOP_TOKEN_IDS)]
LogitBias = Annotated[list[tuple[Index, Bias]], Meta(max_length=MAX_LOGIT_BIAS)]
TokenSet = Annotated[bytes, Meta(max_length=MAX_VOCAB_SIZE // 8)]  # a bit for each id, as from `pack_token_set`
BadWord = Annotated[list[Index], Meta(min_length=1, max_length=MAX_BAD_WORD_TOKENS)]
BadWords = Annotated[list[BadWord], Meta(max_length=MAX_BAD_WORDS)]
LogprobTokenIds = Annotated[list[Index], Meta(max_length=MAX_LOGPROB_TOKEN_IDS)]
ReasoningMarkers = Annotated[list[Index], Meta(min_length=1, max_length=8)]
CacheSalt = Annotated[str, Meta(max_length=MAX_CACHE_SALT)]


class FinishReason(Enum):
    """The reason why a sequence ended."""

    STOP = "stop"  # an end-of-sequence or stop token was sampled
    LENGTH = "length"  # max_tokens, or the end of the context
    ABORT = "abort"  # the gateway aborted it or is gone
    ERROR = "error"  # the engine failed


class Refusal(Enum):
    """The reasons for which a `Submit` is not accepted."""

    QUEUE_FULL = "queue_full"  # come back later
    TOO_LONG = "too_long"  # could never fit, now or later
    DRAINING = "draining"  # this engine takes no new work
    INVALID = "invalid"  # breaks a rule of this protocol
    NOT_READY = "not_ready"  # no worker has come yet
    UNKNOWN_ADAPTER = "unknown_adapter"  # the engine has none of that name


class Epoch(Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """Identifies one configuration of an engine's workers. Results of another epoch are dropped."""

    boot_id: ShortText  # random, drawn by each scheduler process
    count: Count  # incremented each time they are configured


class ReasoningLimit(Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """Ends reasoning that is as long as it may be: then only the end of reasoning can be sampled.

    A token of `begins` begins reasoning, each time that the output has one, and one of `ends` ends it.
    """

    max_tokens: Index  # of output, between the two
    begins: ReasoningMarkers
    ends: ReasoningMarkers  # the first one is that which can be sampled then
    is_open: bool = False  # the prompt ends inside reasoning


class Sampling(Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """The parameters by which worker and scheduler choose a sequence's tokens and its end.

    Stop strings are not among them: the gateway looks for them in the text and aborts the request.
    """

    max_tokens: Index  # maximum number of output tokens; 0 only scores the prompt
    seed: Annotated[int, Meta(ge=0)]  # 64 bits; noise is Philox(key=seed, counter=(token, output position, sample))
    temperature: Annotated[float, Meta(ge=0, le=1e30)] = 1.0  # 0 is greedy
    top_p: Annotated[float, Meta(gt=0, le=1)] = 1.0  # 1 is off
    top_k: Index = 0  # 0 is off
    min_p: Probability = 0.0  # 0 is off
    presence_penalty: Bias = 0.0  # over output tokens
    frequency_penalty: Bias = 0.0  # over output tokens
    repetition_penalty: RepetitionPenalty = 1.0  # over prompt and output tokens
    logit_bias: LogitBias = []  # (token id, added to its logit)
    min_tokens: Index = 0  # number of output tokens before which no stop token can be sampled
    stop_token_ids: StopTokenIds = []  # sampling one ends the sequence; includes end-of-sequence ids unless ignored
    logprobs: OptionalIndex = -1  # alternatives reported for each output token; -1: no log-probabilities at all
    prompt_logprobs: OptionalIndex = -1  # the same for prompt tokens; such a request takes no prefix hits
    grammar: LongText = ""  # that the output has to follow, in llguidance's notation; empty: none
    allowed_tokens: TokenSet = b""  # only these can be sampled; empty: all. End-of-sequence ids are no exception
    bad_words: BadWords = []  # sequences of tokens; the one that would complete one in the output cannot be sampled
    reasoning_limit: ReasoningLimit | None = None  # None: reasoning is as long as the model likes
    logprob_token_ids: LogprobTokenIds = []  # reported as the alternatives, instead of the likeliest tokens

    @property
    def num_alternatives(self) -> int:
        """The number of alternatives for each output token; -1: no log-probabilities at all."""
        return len(self.logprob_token_ids) or self.logprobs


class TokenLogprobs(Struct, frozen=True, array_like=True, forbid_unknown_fields=True, gc=False):
    """Log-probabilities at one position, of the model's own distribution (before bias, penalties and temperature)."""

    logprob: Float32  # of the token at this position
    rank: Index  # of that token, 1 being the likeliest
    top_ids: list[Index]  # the likeliest tokens, best first; or those of `logprob_token_ids`, in their order
    top_logprobs: list[Float32]  # of `top_ids`


class Suspicion(Struct, frozen=True, array_like=True, forbid_unknown_fields=True, gc=False):
    """The evidence against a sequence, from workers that died while they ran it. It goes with the sequence."""

    cleared_at: Index = 0  # it is a suspect until the positions before this one are computed; 0: it is none
    deaths_alone: Index = 0  # workers that died while they ran nothing else, since it was last cleared
    start: Index = 0  # when the last of these died, positions from this one
    end: Index = 0  # up to, but not including, this one were being computed


# every process → the processes that watch it


class ProcessStats(Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """A process's own measurements, by which others judge whether it lives (`shared.liveness`)."""

    busy_seconds: Seconds = 0.0  # time that its loop has spent in the present turn; 0 while it waits for messages
    cpu_seconds: CpuSeconds = 0.0  # CPU time used so far
    cpu_wait_seconds: CpuSeconds = 0.0  # time for which threads have waited for a CPU so far; 0 if not known


class Heartbeat(Struct, frozen=True, array_like=True, tag=4, forbid_unknown_fields=True):
    """Shows that a process lives. A thread sends it over a socket of its own, whatever the process's loop does."""

    identity: ShortText  # identity of the process's main socket; for the supervisor, its role
    process: ProcessStats


# gateway → scheduler


class Hello(Struct, frozen=True, array_like=True, tag=1, forbid_unknown_fields=True):
    """A gateway's first message on a new socket."""

    version: Count
    identity: ShortText  # the socket's identity, for logs


class Submit(Struct, frozen=True, array_like=True, tag=2, forbid_unknown_fields=True):
    """Asks to run a request. `Accepted` or `Refused` answers at once. Progress follows, and one finish per sample."""

    id: Count  # of this attempt, never used again on the same socket
    tokens: bytes  # int32: the prompt, followed by the output so far
    prompt_len: Size
    sampling: Sampling
    n: Size = 1  # number of samples; more than one only if there is no output yet
    sample: Index = 0  # index of the first sample
    priority: Annotated[int, Meta(ge=-(2**63), le=_INT64)] = 0  # lower is served first
    arrival: WallTime = 0.0  # when the gateway received the request; orders the queue across gateways
    samples_before: Index = 0  # samples of the same user's request in earlier `Submit`s; sets its turn in the queue
    resumed: bool = False  # an engine has accepted it before, and was lost; it is never refused for load
    request_id: RequestId = ""  # the id that the client sees
    suspicion: Suspicion = Suspicion()  # of its first sample, as the last engine reported it
    cache_salt: CacheSalt = ""  # it shares cached blocks only with requests that have the same
    adapter: ShortText = ""  # the name of the adapter that it uses; empty: none
    adapter_digest: ShortText = ""  # of that adapter's files, if there is output; empty: any of that name


class Abort(Struct, frozen=True, array_like=True, tag=3, forbid_unknown_fields=True):
    """Stops a request or one sample of it. It is idempotent and has no answer. Unknown ids are ignored."""

    id: Count
    sample: OptionalIndex = -1  # -1: all samples


class ResetPrefixCache(Struct, frozen=True, array_like=True, tag=5, forbid_unknown_fields=True):
    """Has the engine forget its cached blocks. `PrefixCacheReset` answers when it has."""

    id: Count  # never used again on the same socket


class AddAdapter(Struct, frozen=True, array_like=True, tag=6, forbid_unknown_fields=True):
    """Has the engine load an adapter, which requests can name from then on. `AdapterAnswer` says how that went."""

    id: Count  # never used again on the same socket
    name: ShortText
    path: ShortText  # a folder in PEFT's format, on the worker's host
    replaces: bool = False  # an adapter of this name may be there, and is replaced


class RemoveAdapter(Struct, frozen=True, array_like=True, tag=7, forbid_unknown_fields=True):
    """Has the engine forget an adapter. Requests that use it go on; new ones are refused. `AdapterAnswer` answers."""

    id: Count  # never used again on the same socket
    name: ShortText


# scheduler → gateway


class ModelInfo(Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """A worker's description of the model that it loaded."""

    name: ShortText  # the folder or name it was loaded from
    architecture: ShortText  # as in config.json
    dtype: ShortText  # of the weights in memory
    max_positions: Count  # the longest context that the model was trained for
    vocab_size: Index  # logits per position
    fingerprint: ShortText  # equal fingerprints give equal tokens
    weights_digest: ShortText = ""  # of the weight files; all workers of an engine must agree; empty: not known
    text_digest: ShortText = ""  # of the tokenizer's files; a gateway's must be the same; empty: not known


class AdapterInfo(Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """An adapter that requests can name."""

    name: ShortText
    path: ShortText
    digest: ShortText = ""  # of its files; equal digests give equal tokens


class Snapshot(Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """The state of one engine: the present values of gauges, and counters since the scheduler's start."""

    running: Count = 0  # sequences with a slot
    waiting: Count = 0  # sequences without a slot
    waiting_tokens: Count = 0  # tokens of the waiting sequences
    blocks: Count = 0  # blocks of the pool
    blocks_free: Count = 0  # blocks that no sequence holds, cached ones included
    blocks_cached: Count = 0  # blocks in the prefix index, held or not
    tokens_held: Count = 0  # positions in use in held blocks, shared blocks counted once; shows internal waste
    in_flight: Count = 0  # plans sent whose result has not come yet
    steps: Count = 0  # counter: results committed
    preemptions: Count = 0  # counter
    prefix_queries: Count = 0  # counter: tokens looked up in the prefix index
    prefix_hits: Count = 0  # counter: tokens found there
    prompt_tokens: Count = 0  # counter: prompt tokens computed or found in the prefix index
    generation_tokens: Count = 0  # counter
    accepted: Count = 0  # counter: requests
    refused: Count = 0  # counter: requests
    finished_stop: Count = 0  # counter: sequences
    finished_length: Count = 0  # counter: sequences
    finished_abort: Count = 0  # counter: sequences
    finished_error: Count = 0  # counter: sequences
    worker_losses: Count = 0  # counter: epochs that ended with a dead, hung or failed worker
    block_size: Count = 0  # tokens per block
    waiting_deferred: Count = 0  # the part of `waiting` that waits for something other than memory
    prompt_tokens_cached: Count = 0  # counter: the part of `prompt_tokens` found in the prefix index
    step_tokens: list[Count] = []  # counter: steps by the tokens computed in them; see `STEP_TOKEN_BUCKETS`
    step_tokens_sum: Count = 0  # counter: tokens computed in all steps
    tokens_per_second: Annotated[float, Meta(ge=0, le=1e12)] = 0.0  # generated, over the last ten seconds
    rejected_by_requests: Count = 0  # counter: the part of `refused` due to too many waiting requests
    rejected_by_tokens: Count = 0  # counter: the part of `refused` due to too many waiting tokens
    prefix_caching: bool = False  # the engine has a prefix index
    max_model_len: Count = 0  # maximum number of tokens of one sequence
    prefix_resets: Count = 0  # counter: times that all cached blocks were forgotten on demand
    swapped: Count = 0  # the part of `waiting` whose blocks are in host memory
    block_bytes: Count = 0  # of a block, in all layers
    host_blocks: Count = 0  # blocks of host memory
    host_blocks_free: Count = 0  # those that no swapped sequence holds, cached ones included
    host_blocks_cached: Count = 0  # those in the prefix index
    host_prefix_queries: Count = 0  # counter: tokens looked up in host memory, since the device had none of them
    host_prefix_hits: Count = 0  # counter: tokens found there
    blocks_swapped_out: Count = 0  # counter: blocks copied to host memory
    blocks_swapped_in: Count = 0  # counter: blocks copied back
    preemptions_swapped: Count = 0  # counter: the part of `preemptions` whose blocks were kept in host memory
    max_loras: Count = 0  # adapters that a step can use; 0: the engine takes none
    adapters_running: list[ShortText] = []  # names of those that sequences with a slot use, as loaded now or before
    adapters_waiting: list[ShortText] = []  # names of those that sequences without a slot use


class Welcome(Struct, frozen=True, array_like=True, tag=1, forbid_unknown_fields=True):
    """Answers `Hello` as soon as workers are configured. It is sent again when they are reconfigured."""

    version: Count
    engine: ShortText  # name of the engine, for the labels of metrics
    boot_id: ShortText  # of the scheduler process
    model: ModelInfo
    max_model_len: Index  # maximum number of tokens of prompt and output together, after fitting the pool
    max_num_seqs: Index
    adapters: list[AdapterInfo] = []  # that requests can name


class SchedulingInfo(Struct, frozen=True, array_like=True, forbid_unknown_fields=True, gc=False):
    """The scheduler's treatment of a sequence so far."""

    queued_seconds: Seconds  # time from the acceptance of its request to its first admission
    preemptions: Count
    suspicion: Suspicion = Suspicion()


class ProgressRow(Struct, frozen=True, array_like=True, forbid_unknown_fields=True, gc=False):
    """New output of one sequence, or news about it without output."""

    id: Count  # of the `Submit`
    sample: Index
    position: Index  # output position of the first of `tokens`; a row that does not continue the stream is dropped
    tokens: list[Index]
    logprobs: list[TokenLogprobs] | None = None  # one for each of `tokens`
    prompt_logprobs: list[TokenLogprobs] | None = None  # of the next prompt positions, in order, from position 1
    finish_reason: FinishReason | None = None  # set in the sequence's last row
    cached_tokens: Index = 0  # prompt tokens found in the prefix index at the first admission
    detail: LongText = ""  # set if `finish_reason` is ERROR
    scheduling: SchedulingInfo | None = None  # set if it has changed since the sequence's last row


class Progress(Struct, frozen=True, array_like=True, tag=2, forbid_unknown_fields=True):
    """The new output of one step for one gateway."""

    rows: list[ProgressRow]


class Refused(Struct, frozen=True, array_like=True, tag=3, forbid_unknown_fields=True):
    """Answers a `Submit` that is not accepted. The scheduler keeps nothing of it."""

    id: Count
    reason: Refusal
    detail: LongText
    retry_after: Seconds = 0.0  # an estimate of when the reason will have passed


class Status(Struct, frozen=True, array_like=True, tag=4, forbid_unknown_fields=True):
    """The scheduler's heartbeat to gateways, sent by its step loop."""

    ready: bool  # steps can be run: workers are there and none is overdue
    draining: bool
    snapshot: Snapshot
    process: ProcessStats = ProcessStats()  # of the scheduler


class PrefixCacheReset(Struct, frozen=True, array_like=True, tag=7, forbid_unknown_fields=True):
    """Answers `ResetPrefixCache`. Requests that are admitted from now on find nothing that was computed before."""

    id: Count


class AdapterAnswer(Struct, frozen=True, array_like=True, tag=8, forbid_unknown_fields=True):
    """Answers `AddAdapter` and `RemoveAdapter`."""

    id: Count
    error: LongText = ""  # why nothing was changed; empty: it was done


class UnknownGateway(Struct, frozen=True, array_like=True, tag=6, forbid_unknown_fields=True):
    """Answers a message of a gateway that sent no Hello or was given up. Nothing of its requests remains."""


class Accepted(Struct, frozen=True, array_like=True, tag=5, forbid_unknown_fields=True):
    """Answers `Submit`s that are now in the queue. They will not be refused later, however long they wait."""

    ids: list[Count]


# scheduler → worker


class Configure(Struct, frozen=True, array_like=True, tag=1, forbid_unknown_fields=True):
    """Begins an epoch: the worker drops all sequences and allocates KV memory and slots of these sizes."""

    epoch: Epoch
    block_size: Size  # tokens
    num_blocks: Size
    max_num_seqs: Size  # slots
    max_model_len: Size
    max_num_batched_tokens: Size
    num_host_blocks: Index = 0


class LoadAdapter(Struct, frozen=True, array_like=True, tag=4, forbid_unknown_fields=True):
    """Has the worker read an adapter into host memory. `AdapterLoaded` or `AdapterRefused` answers; steps go on."""

    adapter: Count  # its number: never used again, not even for the same name
    path: ShortText


class UnloadAdapter(Struct, frozen=True, array_like=True, tag=6, forbid_unknown_fields=True):
    """Has the worker drop an adapter from host memory. No plan names it any more."""

    adapter: Count


class NewSequence(Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """A sequence that enters a slot, whether it is new or resumed."""

    slot: Index
    tokens: bytes  # int32: all tokens so far
    prompt_len: Index
    blocks: list[Index]  # the block table so far
    sampling: Sampling
    sample: Index
    request_id: RequestId = ""  # the id that the client sees
    adapter_slot: OptionalIndex = -1  # of its adapter; -1: it uses none


class Fork(Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """Slots that start as copies of `parent` (tokens, block table, sampling), each with its own sample index.

    The parent has a sampling row in the same plan, and each child samples from that row's logits as well.
    """

    parent: Index  # slot
    children: list[tuple[Index, Index]]  # (slot, sample)


class TableWrite(Struct, frozen=True, array_like=True, forbid_unknown_fields=True, gc=False):
    """`table[slot][index : index + len(blocks)] = blocks`."""

    slot: Index
    index: Index
    blocks: list[Index]


class Row(Struct, frozen=True, array_like=True, forbid_unknown_fields=True, gc=False):
    """The computation of positions `start` to `start + count - 1` of a slot's sequence.

    The slot already has their tokens: they came with the sequence, or an earlier step sampled them. Ranks of pipeline
    stages before the last do not see what is sampled, and get those from the plan's `sampled`.
    """

    slot: Index
    start: Index
    count: Index
    samples: Index  # tokens to sample after the last position: 0 or 1


class StepPlan(Struct, frozen=True, array_like=True, tag=2, forbid_unknown_fields=True):
    """The plan of one step: the changes since the last plan, and the rows to compute. All ranks get the same one.

    The worker applies it in this order: released slots, new sequences, forks, sampled tokens, table writes, blocks
    swapped out, block copies, blocks swapped in, adapter slots, and then one forward pass over all rows.

    With pipeline stages, a slot whose next token is being sampled has no row until the result of that step is back.
    The plan that goes on with it names the token in `sampled`: it stands at `start` of the slot's row, behind those
    that the slot had. Each is named once, and to all ranks. Without stages `sampled` is empty: all ranks see what is
    sampled, before the scheduler does.
    """

    epoch: Epoch
    step: Count  # consecutive within an epoch, from 0
    rows: list[Row]
    new_sequences: list[NewSequence] = []
    forks: list[Fork] = []
    table_writes: list[TableWrite] = []
    block_copies: list[tuple[Index, Index]] = []  # (source, destination), in all layers; no block is on both sides
    released_slots: list[Index] = []
    swap_out: list[tuple[Index, Index]] = []  # (block, host block), in all layers
    swap_in: list[tuple[Index, Index]] = []  # (host block, block), in all layers
    adapter_slots: list[tuple[Index, Count]] = []  # (adapter slot, adapter): it holds this one from now on
    sampled: list[tuple[Index, Index]] = []  # (slot, token): its next one, if there are pipeline stages


class Stop(Struct, frozen=True, array_like=True, tag=3, forbid_unknown_fields=True):
    """Asks the worker to end its process."""


# worker → scheduler


class Register(Struct, frozen=True, array_like=True, tag=1, forbid_unknown_fields=True):
    """A worker rank's first message on a new socket. Its weights are loaded and warmed up."""

    version: Count
    identity: ShortText  # the socket's identity, for logs
    rank: Index  # its number; the first rank of the last stage samples, and its results count
    world_size: Index  # ranks that compute the model together
    pid: Index  # on the worker's host
    device: ShortText
    model: ModelInfo
    kv_bytes_per_token: Count  # of all layers, keys and values together
    kv_memory: Count  # bytes available for KV
    step_seconds: Seconds  # measured fixed cost of a step
    token_seconds: Seconds  # measured cost of one more token in a step
    host_kv_memory: Count = 0  # bytes of host memory for swapped blocks
    swap_bytes_per_second: Annotated[float, Meta(ge=0, le=1e15)] = 0.0  # measured, in the slower direction
    max_loras: Index = 0  # adapter slots; 0: the worker takes no adapters
    max_cpu_loras: Index = 0  # adapters that the worker keeps in host memory
    num_stages: Annotated[int, Meta(ge=1, le=1024)] = 1  # pipeline stages, each of equally many ranks

    @property
    def sampling_rank(self) -> int:
        """The rank whose results count: the first of the last stage."""
        return self.world_size - self.world_size // self.num_stages


class SampledRow(Struct, frozen=True, array_like=True, forbid_unknown_fields=True, gc=False):
    """The output of a slot in a step: of a sampling row, a fork's child or a row with prompt log-probabilities."""

    slot: Index
    tokens: list[Index]
    logprobs: list[TokenLogprobs] | None = None  # one for each of `tokens`, if requested
    prompt_logprobs: list[TokenLogprobs] | None = None  # of positions start+1 .. min(start+count, prompt_len-1)
    error: LongText = ""  # why the sequence cannot go on; its tokens do not count then


NOTHING_LEFT = "no token may come next: allowed_token_ids, bad_words and the output's grammar have none in common"
"""The `error` of a sequence that may sample nothing. The request is to blame for it, and not the engine."""


class StepResult(Struct, frozen=True, array_like=True, tag=2, forbid_unknown_fields=True):
    """The result of the plan of the same epoch and step. Ranks that do not sample send it without rows."""

    epoch: Epoch
    step: Count
    rows: list[SampledRow]
    seconds: Seconds = 0.0  # time that the worker spent on it


class Fault(Struct, frozen=True, array_like=True, tag=3, forbid_unknown_fields=True):
    """Reports that a step raised, or the configuration. The worker ends itself after this message, since its state is
    unknown.
    """

    epoch: Epoch
    step: Count  # 0 also for the configuration
    detail: LongText  # the traceback, or a line: what to do about missing memory, or how the loss of a rank showed
    out_of_memory: bool = False  # the device had too little for the whole step: no request is to blame


class Configured(Struct, frozen=True, array_like=True, tag=5, forbid_unknown_fields=True):
    """Answers `Configure`. Plans of this epoch can be sent now."""

    epoch: Epoch


class AdapterLoaded(Struct, frozen=True, array_like=True, tag=9, forbid_unknown_fields=True):
    """Answers `LoadAdapter`. Plans can name the adapter now."""

    adapter: Count
    digest: ShortText  # of its files


class AdapterRefused(Struct, frozen=True, array_like=True, tag=10, forbid_unknown_fields=True):
    """Answers `LoadAdapter`. The worker keeps nothing of it."""

    adapter: Count
    detail: LongText  # what is wrong with its files


class Leave(Struct, frozen=True, array_like=True, tag=6, forbid_unknown_fields=True):
    """Says that the worker was told to end. It computes what it is sent until it gets `Stop`."""


GatewayToScheduler = Hello | Submit | Abort | Heartbeat | ResetPrefixCache | AddAdapter | RemoveAdapter
SchedulerToGateway = (
    Welcome | Progress | Refused | Status | Accepted | UnknownGateway | PrefixCacheReset | AdapterAnswer
)
SchedulerToWorker = Configure | StepPlan | Stop | LoadAdapter | UnloadAdapter
WorkerToScheduler = Register | StepResult | Fault | Heartbeat | Configured | Leave | AdapterLoaded | AdapterRefused
ToSupervisor = Heartbeat


class _SubmitId(Struct, frozen=True, array_like=True, tag=2):
    """The first field of a `Submit`; the others are not looked at."""

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
    """Encode a message of this file."""
    return _encoder.encode(message)


def decode_from_gateway(data: bytes) -> GatewayToScheduler:
    """Decode a message from a gateway to a scheduler."""
    return _decode(_from_gateway, data)


def decode_submit_id(data: bytes) -> int | None:
    """Return the id of a `Submit` that cannot be decoded as a whole, so that it can be refused; None if it has none."""
    try:
        return _decode(_submit_id, data).id
    except ProtocolError:
        return None


def decode_to_gateway(data: bytes) -> SchedulerToGateway:
    """Decode a message from a scheduler to a gateway."""
    return _decode(_to_gateway, data)


def decode_to_worker(data: bytes) -> SchedulerToWorker:
    """Decode a message from a scheduler to a worker."""
    return _decode(_to_worker, data)


def decode_from_worker(data: bytes) -> WorkerToScheduler:
    """Decode a message from a worker to a scheduler."""
    return _decode(_from_worker, data)


def decode_to_supervisor(data: bytes) -> ToSupervisor:
    """Decode a message from a service to the supervisor."""
    return _decode(_to_supervisor, data)


def _decode(decoder: "msgspec.msgpack.Decoder[M]", data: bytes) -> M:
    try:
        return decoder.decode(data)
    except (msgspec.DecodeError, RecursionError) as error:  # ValidationError is a DecodeError
        raise ProtocolError(f"not a message of protocol version {VERSION}: {error}") from error


def pack_tokens(tokens: Any) -> bytes:
    """Return token ids, an int32 `array` or any iterable of ints, as little-endian int32 bytes."""
    ids = tokens if isinstance(tokens, array) and tokens.typecode == "i" else array("i", tokens)
    if sys.byteorder == "big":
        ids = array("i", ids)
        ids.byteswap()
    return ids.tobytes()


def unpack_tokens(data: bytes) -> "array[int]":
    """Return the token ids in `data` as an int32 `array`. Raise ProtocolError if the length is no multiple of four."""
    if len(data) % 4:
        raise ProtocolError(f"token bytes must come in fours, got {len(data)}")
    ids = array("i")
    ids.frombytes(data)
    if sys.byteorder == "big":
        ids.byteswap()
    return ids


def pack_token_set(ids: Collection[int]) -> bytes:
    """Return token ids as a `TokenSet`: a bit for each id, the lowest first, in as many bytes as the highest needs."""
    digits = bytearray(b"0") * (max(ids, default=-1) + 1)  # of a binary number, the lowest first
    one = ord("1")
    for id in ids:
        digits[id] = one
    digits.reverse()
    return int(digits or b"0", 2).to_bytes((len(digits) + 7) // 8, "little")
