"""Lists the participants: Quire in each precision, and the peers, in the order of their turns.

`--quick` measures only what a target or the chart needs.
"""

from collections.abc import Callable
from functools import partial
from typing import NamedTuple

from benchmarks.peers import llama_cpp, openvino, quire, transformers, vllm
from benchmarks.peers.launch import Launch, Place
from benchmarks.peers.workloads import LONG_TAIL, SHARED_PREFIX, STEADY, WORKLOADS, Workload


class Peer(NamedTuple):
    """A participant."""

    key: str  # what `--only` and the result file call it
    title: str
    precision: str
    served: bool  # over HTTP, or else in process
    prepare: Callable[[Place], Launch]  # installs it; raises `Skipped`
    needed: tuple[Workload, ...]  # with `--quick`

    def workloads(self, quick: bool) -> tuple[Workload, ...]:
        return self.needed if quick else WORKLOADS


DEFAULT: quire.Settings = {}  # the file's own 4 bits
INT8 = {"quantization": "int8"}
CACHE8 = {"kv_cache_dtype": "int8"}  # as OpenVINO has by default
BFLOAT16 = {"dtype": "bfloat16"}

ROSTER = (
    Peer("quire", "Quire", "GGUF's 4-bit", True, partial(quire.served, settings=DEFAULT), STEADY),
    Peer("llama.cpp-q4", "llama.cpp server", "Q4_0", True, partial(llama_cpp.prepare, quantisation="Q4_0"), STEADY),
    Peer("quire-int8", "Quire", "int8", True, partial(quire.served, settings=INT8), STEADY),
    Peer("quire-kv8", "Quire", "GGUF's 4-bit, 8-bit KV", True, partial(quire.served, settings=CACHE8), STEADY),
    Peer("llama.cpp-q8", "llama.cpp server", "Q8_0", True, partial(llama_cpp.prepare, quantisation="Q8_0"), STEADY),
    Peer(
        "quire-inside",
        "Quire, in process",
        "GGUF's 4-bit",
        False,
        partial(quire.in_process, settings=DEFAULT),
        (*STEADY, LONG_TAIL),
    ),
    Peer(
        "openvino-gguf",
        "OpenVINO GenAI, in process",
        "GGUF's 4-bit",
        False,
        partial(openvino.prepare, precision="gguf"),
        (*STEADY, LONG_TAIL),
    ),
    Peer(
        "quire-kv8-inside",
        "Quire, in process",
        "GGUF's 4-bit, 8-bit KV",
        False,
        partial(quire.in_process, settings=CACHE8),
        (*STEADY, LONG_TAIL),
    ),
    Peer(
        "quire-int8-inside",
        "Quire, in process",
        "int8",
        False,
        partial(quire.in_process, settings=INT8),
        (*STEADY, LONG_TAIL),
    ),
    Peer(
        "openvino-int8",
        "OpenVINO GenAI, in process",
        "int8",
        False,
        partial(openvino.prepare, precision="int8"),
        (*STEADY, LONG_TAIL),
    ),
    Peer(
        "quire-bf16",
        "Quire",
        "bf16",
        True,
        partial(quire.served, settings=BFLOAT16),
        (*STEADY, SHARED_PREFIX),
    ),
    Peer("vllm", "vLLM CPU", "bf16", True, vllm.prepare, (*STEADY, SHARED_PREFIX)),
    Peer(
        "quire-bf16-inside",
        "Quire, in process",
        "bf16",
        False,
        partial(quire.in_process, settings=BFLOAT16),
        (LONG_TAIL,),
    ),
    Peer(
        "transformers",
        "transformers, static batches, in process",
        "bf16",
        False,
        partial(transformers.prepare, dtype="bfloat16"),
        (LONG_TAIL,),
    ),
)
