"""One example of each message, with every field set."""

from msgspec import Struct

from shared.protocol import (
    Abort,
    Accepted,
    AdapterAnswer,
    AdapterInfo,
    AdapterLoaded,
    AdapterRefused,
    AddAdapter,
    Configure,
    Configured,
    Epoch,
    Fault,
    FinishReason,
    Fork,
    Heartbeat,
    Hello,
    Leave,
    LoadAdapter,
    ModelInfo,
    NewSequence,
    PrefixCacheReset,
    ProcessStats,
    Progress,
    ProgressRow,
    ReasoningLimit,
    Refusal,
    Refused,
    Register,
    RemoveAdapter,
    ResetPrefixCache,
    Row,
    SampledRow,
    Sampling,
    SchedulingInfo,
    Snapshot,
    Status,
    StepPlan,
    StepResult,
    Stop,
    Submit,
    Suspicion,
    TableWrite,
    TokenLogprobs,
    UnknownGateway,
    UnloadAdapter,
    Welcome,
    pack_token_set,
    pack_tokens,
)

EPOCH = Epoch("b007", 3)
MODEL = ModelInfo("smol", "LlamaForCausalLM", "float32", 8192, 49152, "f1", "w1", "t1")
SAMPLING = Sampling(
    max_tokens=64,
    seed=2**64 - 1,
    temperature=0.5,
    top_p=0.9,
    top_k=40,
    min_p=0.05,
    presence_penalty=0.25,
    frequency_penalty=-0.25,
    repetition_penalty=1.5,
    logit_bias=[(7, -100.0)],
    min_tokens=2,
    stop_token_ids=[0, 2],
    logprobs=1,
    prompt_logprobs=0,
    grammar="start: A",
    allowed_tokens=pack_token_set([1, 9]),
    bad_words=[[3], [4, 5]],
    reasoning_limit=ReasoningLimit(20, [6], [7, 8], is_open=True),
    logprob_token_ids=[11, 10],
)
LOGPROBS = [TokenLogprobs(-0.5, 2, [4, 5], [-0.25, -0.5])]
TOKENS = pack_tokens([1, 2, 70_000])
SUSPICION = Suspicion(12, 1, 10, 11)
SCHEDULING = SchedulingInfo(0.75, 2, SUSPICION)
PROCESS = ProcessStats(0.5, 12.5, 3.25)
SNAPSHOT = Snapshot(*range(1, 25), [1, 2, 3], 26, 27.5, 28, 29, True, 31, *range(32, 44), ["a"], ["b"])

FROM_GATEWAY: list[Struct] = [
    Hello(1, "gateway-1-a"),
    Submit(9, TOKENS, 2, SAMPLING, 2, 3, -1, 1.5, 5, True, "chatcmpl-7", SUSPICION, "salt", "adapter_1", "1a2b"),
    Abort(9, 3),
    Heartbeat("gateway-1-a", PROCESS),
    ResetPrefixCache(9),
    AddAdapter(9, "adapter_1", "/adapters/1", True),
    RemoveAdapter(9, "adapter_1"),
]
TO_GATEWAY: list[Struct] = [
    Welcome(1, "0", "b007", MODEL, 4096, 128, [AdapterInfo("adapter_1", "/adapters/1", "d1")]),
    Progress([ProgressRow(9, 3, 5, [42], LOGPROBS, LOGPROBS, FinishReason.ERROR, 16, "why", SCHEDULING)]),
    Refused(9, Refusal.QUEUE_FULL, "full", 2.5),
    Status(True, False, SNAPSHOT, PROCESS),
    Accepted([9, 10]),
    UnknownGateway(),
    PrefixCacheReset(9),
    AdapterAnswer(9, "no such folder"),
]
TO_WORKER: list[Struct] = [
    Configure(EPOCH, 16, 1000, 128, 4096, 640, 500),
    StepPlan(
        EPOCH,
        7,
        [Row(0, 2, 1, 1)],
        [NewSequence(0, TOKENS, 2, [8, 9], SAMPLING, 3, "chatcmpl-7", 1)],
        [Fork(0, [(1, 1)])],
        [TableWrite(0, 2, [10])],
        [(8, 11)],
        [5],
        [(12, 3)],
        [(4, 13)],
        [(1, 17)],
        [(0, 42)],
    ),
    Stop(),
    LoadAdapter(17, "/adapters/1"),
    UnloadAdapter(17),
]
FROM_WORKER: list[Struct] = [
    Register(1, "worker-1-a", 3, 4, 4242, "cpu", MODEL, 46080, 2**31, 0.03, 0.0005, 2**30, 1e9, 4, 8, 2),
    StepResult(EPOCH, 7, [SampledRow(0, [42], LOGPROBS, LOGPROBS, "no way on")], 0.03),
    Fault(EPOCH, 7, "Traceback", True),
    Heartbeat("worker-1-a", PROCESS),
    Configured(EPOCH),
    Leave(),
    AdapterLoaded(17, "d1"),
    AdapterRefused(17, "no such folder"),
]
