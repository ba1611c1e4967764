"""Lists the participants: Quire in each precision, and the peers, in the order of their turns."""

from collections.abc import Callable
from functools import partial
from typing import NamedTuple

from benchmarks.peers import llama_cpp, openvino, quire, transformers, vllm
from benchmarks.peers.launch import Launch, Place
from benchmarks.peers.models import LARGE, MIDDLE, SMALL


class Peer(NamedTuple):
    """A participant."""

    key: str  # what `--only` and the result file call it
    title: str
    precision: str
    served: bool  # over HTTP, or else in process
    prepare: Callable[[Place], Launch]  # installs it; raises `Skipped`
    models: tuple[str, ...]  # that it is measured with


SMALL_ONLY, MIDDLE_ONLY = (SMALL.key,), (MIDDLE.key,)
SMALLER, LARGER = (SMALL.key, MIDDLE.key), (MIDDLE.key, LARGE.key)
ALL = (SMALL.key, MIDDLE.key, LARGE.key)

DEFAULT: quire.Settings = {}  # the file's own 4 bits
INT8, INT4 = {"quantization": "int8"}, {"quantization": "int4"}
CACHE8 = {"kv_cache_dtype": "int8"}  # as OpenVINO has by default
BFLOAT16 = {"dtype": "bfloat16"}


def _served(key: str, precision: str, settings: quire.Settings, models: tuple[str, ...]) -> Peer:
    return Peer(key, "Quire", precision, True, partial(quire.served, settings=settings), models)


def _inside(key: str, precision: str, settings: quire.Settings, models: tuple[str, ...]) -> Peer:
    run = partial(quire.in_process, settings=settings)
    return Peer(f"{key}-inside", "Quire, in process", precision, False, run, models)


def _llama_cpp(key: str, quantisation: str) -> Peer:
    return Peer(
        f"llama.cpp-{key}",
        "llama.cpp server",
        quantisation,
        True,
        partial(llama_cpp.prepare, quantisation=quantisation),
        ALL,
    )


def _openvino(precision: str, title: str, models: tuple[str, ...]) -> Peer:
    run = partial(openvino.prepare, precision=precision)
    return Peer(f"openvino-{precision}", "OpenVINO GenAI, in process", title, False, run, models)


ROSTER = (
    Peer("vllm-w8a8", "vLLM CPU", "W8A8", True, vllm.int8, ALL),
    _served("quire", "GGUF's 4-bit", DEFAULT, SMALL_ONLY),
    _served("quire-kv8", "GGUF's 4-bit, 8-bit KV", DEFAULT | CACHE8, SMALL_ONLY),
    _served("quire-int4", "int4", INT4, LARGER),
    _served("quire-int4-kv8", "int4, 8-bit KV", INT4 | CACHE8, LARGER),
    _llama_cpp("q4", "Q4_0"),
    _served("quire-int8", "int8", INT8, ALL),
    _served("quire-int8-kv8", "int8, 8-bit KV", INT8 | CACHE8, ALL),
    _llama_cpp("q8", "Q8_0"),
    _inside("quire", "GGUF's 4-bit", DEFAULT, SMALL_ONLY),
    _openvino("gguf", "GGUF's 4-bit", SMALL_ONLY),
    _inside("quire-kv8", "GGUF's 4-bit, 8-bit KV", DEFAULT | CACHE8, SMALL_ONLY),
    _inside("quire-int4", "int4", INT4, MIDDLE_ONLY),
    _openvino("int4", "int4", MIDDLE_ONLY),
    _inside("quire-int4-kv8", "int4, 8-bit KV", INT4 | CACHE8, MIDDLE_ONLY),
    _inside("quire-int8", "int8", INT8, SMALLER),
    _openvino("int8", "int8", SMALLER),
    _inside("quire-int8-kv8", "int8, 8-bit KV", INT8 | CACHE8, SMALLER),
    _served("quire-bf16", "bf16", BFLOAT16, SMALL_ONLY),
    Peer("vllm", "vLLM CPU", "bf16", True, vllm.bfloat16, SMALL_ONLY),
    _inside("quire-bf16", "bf16", BFLOAT16, SMALL_ONLY),
    Peer(
        "transformers",
        "transformers, static batches, in process",
        "bf16",
        False,
        partial(transformers.prepare, dtype="bfloat16"),
        SMALL_ONLY,
    ),
)
