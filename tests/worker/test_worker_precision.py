"""Tests the data types of a computation: which are chosen or refused, and batch invariance in each."""

import itertools
import random
from pathlib import Path
from typing import Any

import pytest
import torch

from kernels.cpu import extension
from kernels.cpu import ops as cpu_ops
from kernels.load import kv_cache_dtypes, reference
from services.worker.config import WorkerConfig
from services.worker.models.precision import ModelSource, Precision, choose_precision, why_dequantized
from shared.errors import ConfigError
from shared.hub.checkpoint import locate
from tests.models.tiny_models import Forward, llama, reference_logits, save

CPU, CUDA = torch.device("cpu"), torch.device("cuda", 0)
F32, BF16, F16, FP8 = torch.float32, torch.bfloat16, torch.float16, torch.float8_e4m3fn
BLOCK = 16
compiled = pytest.mark.skipif(not extension.load(), reason="the kernels are not compiled here")
CPU_TYPES = frozenset({F32, BF16, F16, torch.int8})
GPU_TYPES = frozenset({F32, torch.int8, FP8})


def chosen(
    device: torch.device = CPU,
    dtype_of_file: torch.dtype = BF16,
    own: Any = None,
    native: bool = True,
    kv_cache_dtypes: frozenset[torch.dtype] | None = None,
    quantized_weights: bool | None = None,
    **settings: Any,
) -> Precision:
    """Choose for a CPU with compiled kernels, or a new GPU, unless other facts are given."""
    is_cpu = device.type == "cpu"
    return choose_precision(
        WorkerConfig(**settings),
        device,
        ModelSource(dtype_of_file, own, native),
        kv_cache_dtypes=kv_cache_dtypes or (CPU_TYPES if is_cpu else GPU_TYPES),
        quantized_weights=is_cpu if quantized_weights is None else quantized_weights,
    )


def test_types_are_chosen_by_settings_checkpoint_and_device() -> None:
    assert chosen() == Precision(F32, None, F32)
    assert chosen(dtype="bfloat16") == Precision(BF16, None, BF16)
    assert chosen(dtype="half", kv_cache_dtype="float32") == Precision(F16, None, F32)
    assert chosen(quantization="int8") == Precision(F32, "int8", BF16)
    assert chosen(quantization="gguf", own="gguf", kv_cache_dtype="float32") == Precision(F32, "gguf", F32)
    assert chosen(CUDA) == Precision(BF16, None, BF16)
    assert chosen(CUDA, F32) == Precision(BF16, None, BF16)
    assert chosen(CUDA, kv_cache_dtype="int8") == Precision(BF16, None, torch.int8)
    assert chosen(CUDA, kv_cache_dtype="float32") == Precision(BF16, None, F32)
    assert chosen(CUDA, kv_cache_dtype="fp8") == Precision(BF16, None, FP8)
    assert chosen(CUDA, F16, kv_cache_dtype="fp8_e4m3") == Precision(F16, None, FP8)
    assert chosen(CUDA, dtype="float16", kv_cache_dtype="float16") == Precision(F16, None, F16)
    assert [chosen().name, chosen(quantization="int4").name] == ["float32", "int4"]


@pytest.mark.parametrize("own", ["gguf", "gptq", "awq", "squeezellm"])
def test_a_checkpoint_stays_quantised_unless_a_dtype_is_set(own: str) -> None:
    assert chosen(own=own) == chosen(own=own, quantization=own) == Precision(F32, own, BF16)
    assert chosen(own=own, dtype="float32") == chosen(own=own, quantization="none") == Precision(F32, None, F32)
    assert chosen(own=own, dtype="half") == Precision(F16, None, F16)
    assert chosen(own=own, dtype="half", quantization=own) == Precision(F16, own, BF16)
    assert chosen(own=own, quantization="int8") == Precision(F32, "int8", BF16)


@pytest.mark.parametrize("own", ["gguf", "gptq", "awq", "squeezellm"])
def test_weights_that_cannot_stay_quantised_are_dequantised_with_a_reason(own: Any) -> None:
    plain = Precision(F32, None, F32)
    assert chosen(own=own, native=False) == chosen(own=own, quantized_weights=False) == chosen(own="other") == plain
    assert chosen(CUDA, F16, own=own) == Precision(F16, None, F16)

    def reason(
        own: Any, device: torch.device = CPU, native: bool = True, quantized_weights: bool = True, **settings: Any
    ) -> str | None:
        source = ModelSource(F16, own, native)
        return why_dequantized(WorkerConfig(**settings), device, source, quantized_weights=quantized_weights)

    assert reason(own) is reason(None, native=False) is reason(None, quantized_weights=False) is None
    assert "family" in str(reason(own, native=False))
    assert reason(own, quantized_weights=False) == "the kernels compiled for this CPU"
    assert "not on GPUs yet" in str(reason(own, CUDA, quantized_weights=False))
    assert "Q8_0" in str(reason("other"))
    assert reason(own, quantized_weights=False, dtype="float32") is None
    assert reason(own, quantized_weights=False, quantization="none") is None


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"quantization": "gguf"}, "--quantization gguf: the model is not a GGUF file"),
        ({"quantization": "gguf", "own": "other"}, "--quantization gguf: the model is not a GGUF file with blocks"),
        ({"quantization": "gptq", "own": "awq"}, "--quantization gptq: the model is not .*gptq"),
        ({"quantization": "gguf", "own": "gguf", "native": False}, "--quantization gguf needs a family"),
        ({"quantization": "int8", "native": False}, "--quantization int8 needs a family"),
        ({"quantization": "int4", "quantized_weights": False}, "--quantization int4 needs the kernels compiled for"),
        (
            {"quantization": "squeezellm"},
            "--quantization squeezellm: the model is not .*squeezellm",
        ),
        ({"quantization": "awq", "own": "awq", "device": CUDA}, "--quantization awq needs a CPU: .* not on GPUs yet"),
        ({"kv_cache_dtype": "int8", "native": False}, "--kv-cache-dtype int8 needs a family"),
        ({"kv_cache_dtype": "fp8", "native": False, "device": CUDA}, "--kv-cache-dtype fp8 needs a family"),
        ({"kv_cache_dtype": "fp8"}, "--kv-cache-dtype fp8 needs a GPU of compute capability 8.9 .* int8 has the same"),
        (
            {"kv_cache_dtype": "fp8_e4m3", "device": CUDA, "kv_cache_dtypes": GPU_TYPES - {FP8}},
            "--kv-cache-dtype fp8_e4m3 needs a GPU of compute capability 8.9",
        ),
        (
            {"kv_cache_dtype": "bfloat16", "kv_cache_dtypes": frozenset({torch.int8})},
            "--kv-cache-dtype bfloat16 does not work on this device, .* may be float32, int8$",
        ),
        (
            {"kv_cache_dtype": "float16", "device": CUDA},
            "--kv-cache-dtype float16 does not work .* may be bfloat16, float32, float8_e4m3fn, int8$",
        ),
    ],
)
def test_impossible_settings_are_refused(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        chosen(**settings)


def test_a_cpu_takes_no_float8() -> None:
    assert kv_cache_dtypes(cpu_ops, CPU) == CPU_TYPES
    assert kv_cache_dtypes(reference(), CPU) == {torch.int8}


SETTINGS: list[dict[str, str]] = [
    {"dtype": "bfloat16"},
    {"dtype": "float16", "kv_cache_dtype": "float32"},
    {"kv_cache_dtype": "bfloat16"},
    {"quantization": "int8", "kv_cache_dtype": "int8"},
    {"quantization": "int8"},
    {"quantization": "int4", "kv_cache_dtype": "float32"},
]
SHAPE = {
    "vocab_size": 300, "hidden_size": 192, "intermediate_size": 320, "num_attention_heads": 6, "num_key_value_heads": 2,
    "head_dim": 32, "num_hidden_layers": 2,
}  # fmt: skip


@compiled
@pytest.mark.parametrize("settings", SETTINGS, ids=str)
def test_batch_invariance_in_every_type(settings: dict[str, str], tmp_path: Path) -> None:
    chooser, length, slots = random.Random(str(settings)), 60, 6
    forward = Forward(save(llama(**SHAPE), tmp_path), slots=slots, blocks=slots * 4, block_size=BLOCK, **settings)
    texts = [[chooser.randrange(3, 300) for _ in range(length)] for _ in range(slots)]
    for slot, text in enumerate(texts):
        forward.enter(slot, text, range(slot * 4, slot * 4 + 4))
    before = torch.get_num_threads()
    try:
        torch.set_num_threads(1)
        expected = [forward.step((slot, 0, length))[0] for slot in range(slots)]
        for threads, cuts in itertools.product((1, 2), ([7, 8, 40], list(range(1, 60)), [30])):
            torch.set_num_threads(threads)
            forward.storage.zero_()
            for start, end in itertools.pairwise([0, *cuts, length]):
                rows = [(slot, start, end - start) for slot in chooser.sample(range(slots), slots)]
                for (slot, _, _), logits in zip(rows, forward.step(*rows), strict=True):
                    assert torch.equal(logits, expected[slot][start:end])
    finally:
        torch.set_num_threads(before)


@compiled
@pytest.mark.parametrize(("quantization", "bound"), [("int8", 0.05), ("int4", 0.5)])
def test_rounded_weights_are_near(quantization: str, bound: float, tmp_path: Path) -> None:
    model = llama(**SHAPE, initializer_range=0.05)  # larger weights blow up each rounding
    forward = Forward(save(model, tmp_path), block_size=BLOCK, quantization=quantization)
    tokens = list(range(5, 60))
    forward.enter(0, tokens, range(4))
    (ours,) = forward.step((0, 0, len(tokens)))
    theirs = reference_logits(model, tokens)
    assert 1e-4 < (ours - theirs).norm() / theirs.norm() < bound


@compiled
def test_the_embedded_models_quantised_logits_are_near_float32() -> None:
    tokens = list(range(1000, 1040))
    logprobs, fingerprints = [], set()
    for settings in ({"dtype": "float32"}, {}):
        forward = Forward(locate(""), block_size=BLOCK, **settings)
        fingerprints.add(forward.fingerprint)
        forward.enter(0, tokens, range(4))
        logprobs.append(forward.step((0, 0, len(tokens)))[0].log_softmax(-1))
    exact, rounded = logprobs
    assert forward.precision == Precision(F32, "gguf", BF16)
    assert len(fingerprints) == 2  # streams don't move from one to the other unnoticed
    divergence = (exact.exp() * (exact - rounded)).sum(-1)
    assert 1e-6 < divergence.mean() < 0.02
