"""Tests batch invariance: on a CPU, the bits of a row depend on that row, its context and its position only.

They do not depend on how many rows there are, which they are and in what order, where a prompt was cut into chunks,
whether a position was computed with a prompt or after it, or on the number of threads.
"""

import itertools
import random
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from torch import Tensor

from kernels.batch_rows import BatchRows
from kernels.cpu import extension
from kernels.load import ops
from services.worker.config import WorkerConfig
from services.worker.models.load import load_model
from services.worker.start import choose_ops
from shared.errors import ConfigError
from tests.models.fallback_models import stablelm
from tests.models.family_variants import gemma2, qwen2, qwen3_moe
from tests.models.tiny_models import Forward, llama, opt, save

OPS = ops(torch.device("cpu"))
pytestmark = pytest.mark.skipif(not extension.load(), reason="only the compiled kernels are batch-invariant")
LENGTH = 75
SLOTS = 10
BLOCKS = 5  # a sequence
SHAPES = {
    "grouped heads": lambda: llama(
        vocab_size=640, hidden_size=192, intermediate_size=512, num_attention_heads=6, num_key_value_heads=2,
        head_dim=64, num_hidden_layers=2,
    ),
    "wide heads": lambda: llama(
        vocab_size=512, hidden_size=256, intermediate_size=1536, num_attention_heads=4, num_key_value_heads=1,
        head_dim=128, num_hidden_layers=2,
    ),
    "through transformers": lambda: stablelm(
        vocab_size=512, hidden_size=128, intermediate_size=384, num_attention_heads=4, num_hidden_layers=2
    ),
    "each head its own": lambda: opt(
        vocab_size=512, hidden_size=160, ffn_dim=640, num_attention_heads=2, word_embed_proj_dim=160,
        num_hidden_layers=2,
    ),
    "experts": lambda: qwen3_moe(
        vocab_size=512, hidden_size=128, intermediate_size=256, num_attention_heads=4, num_key_value_heads=2,
        head_dim=64, num_hidden_layers=2, num_experts=8, moe_intermediate_size=96, mlp_only_layers=[0],
    ),
    "biases": lambda: qwen2(
        vocab_size=512, hidden_size=128, intermediate_size=256, num_attention_heads=4, num_key_value_heads=2,
        num_hidden_layers=2,
    ),
    "windows and softcaps": lambda: gemma2(
        vocab_size=512, hidden_size=128, intermediate_size=256, num_attention_heads=4, num_key_value_heads=2,
        head_dim=64, num_hidden_layers=2, sliding_window=21,
    ),
}  # fmt: skip


@pytest.fixture(autouse=True)
def _threads() -> Iterator[None]:
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)


def chunks(chooser: random.Random, length: int) -> list[int]:
    """Return sizes that sum up to `length`: many of 1, a few large ones, or anything."""
    most = chooser.choice([1, 3, 12, 40, length])
    sizes: list[int] = []
    while sum(sizes) < length:
        sizes.append(min(chooser.randint(1, most), length - sum(sizes)))
    return sizes


@pytest.mark.parametrize(("name", "cache"), [*((name, "auto") for name in SHAPES), ("biases", "int8")])
def test_logits(name: str, cache: str, tmp_path: Path) -> None:
    chooser = random.Random(name)
    sizes = {"slots": SLOTS, "blocks": SLOTS * BLOCKS, "block_size": 16}
    forward = Forward(save(SHAPES[name](), tmp_path), **sizes, kv_cache_dtype=cache)
    vocab = forward.decoder.shape.vocab_size
    texts = [[chooser.randrange(3, vocab) for _ in range(LENGTH)] for _ in range(SLOTS)]
    blocks = chooser.sample(range(SLOTS * BLOCKS), SLOTS * BLOCKS)
    for slot, text in enumerate(texts):
        forward.enter(slot, text, blocks[slot * BLOCKS : (slot + 1) * BLOCKS])
    torch.set_num_threads(1)
    expected = [forward.step((slot, 0, LENGTH))[0] for slot in range(SLOTS)]
    for turn in range(6):
        torch.set_num_threads(1 + turn % 2)
        forward.storage.zero_()
        slots = chooser.sample(range(SLOTS), chooser.choice([1, 2, 5, SLOTS]))
        todo = {slot: list(itertools.accumulate(chunks(chooser, LENGTH), initial=0)) for slot in slots}
        while todo:
            rows = [
                (slot, todo[slot][0], todo[slot][1] - todo[slot][0]) for slot in chooser.sample(list(todo), len(todo))
            ]
            for (slot, start, count), logits in zip(rows, forward.step(*rows), strict=True):
                assert torch.equal(logits, expected[slot][start : start + count]), (turn, rows)
                del todo[slot][0]
                if len(todo[slot]) == 1:
                    del todo[slot]


@pytest.mark.parametrize("shape", [(960, 576), (576, 1536), (1536, 4096), (131, 60), (77, 333)])
def test_linear(shape: tuple[int, int]) -> None:
    torch.manual_seed(0)
    x, weight = torch.randn(200, shape[1]), OPS.pack_linear(torch.randn(shape))
    torch.set_num_threads(1)
    expected = OPS.linear(x, weight, None)
    for threads in (1, 2):
        torch.set_num_threads(threads)
        for count in [*range(1, 35), 63, 64, 65, 100, 128, 129]:
            for first in (0, 1, 70):
                assert torch.equal(OPS.linear(x[first : first + count], weight, None), expected[first : first + count])


@pytest.mark.parametrize("dim", [32, 64, 80, 96, 128, 256])
@pytest.mark.parametrize(
    ("kv_heads", "options", "dtype"),
    [
        (1, {}, torch.float32),
        (3, {}, torch.bfloat16),
        (6, {}, torch.float32),
        (3, {"softcap": 5.0}, torch.float16),
        (1, {"softcap": 5.0, "window": 40}, torch.float32),
        (3, {}, torch.int8),
        (1, {}, torch.bfloat16),
        (1, {"window": 70}, torch.int8),
    ],
)
def test_attention(dim: int, kv_heads: int, options: dict[str, float], dtype: torch.dtype) -> None:
    torch.manual_seed(dim)
    layout = OPS.kv_layout(1, kv_heads, dim, 16, dtype)
    keys, values = layout.views(layout.allocate(20, torch.device("cpu")))[0]
    OPS.write_kv(*torch.randn(2, 320, kv_heads, dim), keys, values, torch.arange(320))
    q = torch.randn(150, 6, dim)
    table = torch.randperm(20)[:10][None]

    def attend(start: int, count: int, others: list[int]) -> Tensor:
        offsets = torch.tensor([0, count, *(count + 1 + i for i in range(len(others)))])
        plan = OPS.plan_attention(
            BatchRows.of(offsets, torch.tensor([start, *others])),
            table.expand(1 + len(others), -1),
            block_size=16,
            num_kv_heads=kv_heads,
        )
        batch = torch.cat((q[start : start + count], q[: len(others)]))
        return OPS.paged_attention(batch, keys, values, plan, scale=0.1, **options)[:count]

    torch.set_num_threads(1)
    whole = attend(0, 150, [])
    for threads, (start, count) in itertools.product(
        (1, 2), [(0, 1), (20, 1), (149, 1), (7, 2), (30, 3), (9, 11), (2, 34), (1, 70)]
    ):
        torch.set_num_threads(threads)
        for others in ([], [149], [0, 3, 149, 20, 31], [60] * 20):
            assert torch.equal(attend(start, count, others), whole[start : start + count])


@pytest.mark.parametrize(
    ("dim", "kv_heads", "dtype"),
    [(64, 3, torch.int8), (64, 3, torch.bfloat16), (128, 1, torch.float32), (256, 2, torch.float32)],
)
@pytest.mark.parametrize("options", [{}, {"softcap": 5.0}, {"window": 300}], ids=["plain", "softcap", "window"])
def test_attention_over_long_contexts(dim: int, kv_heads: int, dtype: torch.dtype, options: dict[str, float]) -> None:
    """There are more keys than the matrix library sums in one go; chunks end elsewhere, neighbours are longer."""
    chooser = random.Random(dim)
    torch.manual_seed(dim)
    layout = OPS.kv_layout(1, kv_heads, dim, 16, dtype)
    keys, values = layout.views(layout.allocate(90, torch.device("cpu")))[0]
    new = torch.randn(2, 1440, kv_heads, dim)
    OPS.write_kv(new[0], new[1], keys, values, torch.arange(1440))
    q = torch.randn(1440, 6, dim)
    table = torch.randperm(90)[None]

    def attend(start: int, count: int, others: list[int]) -> Tensor:
        offsets = torch.tensor([0, count, *(count + 1 + i for i in range(len(others)))])
        starts = torch.tensor([start, *others])
        tables = table.expand(len(starts), -1)
        plan = OPS.plan_attention(BatchRows.of(offsets, starts), tables, block_size=16, num_kv_heads=kv_heads)
        batch = torch.cat((q[start : start + count], q[others]))
        return OPS.paged_attention(batch, keys, values, plan, scale=0.1, **options)[:count]

    for _ in range(12):
        start, count = chooser.randrange(60, 1140), chooser.choice([1, 2, 17, 100, 300])
        torch.set_num_threads(1)
        before = chooser.choice([1, 9, 50])
        expected = attend(start - before, before + count, [])[before:]
        torch.set_num_threads(chooser.choice([1, 2]))
        others = chooser.choice([[], [1400], [5], [start + 5] * 5, [1400, 1, 700]])
        assert torch.equal(attend(start, count, others), expected), (start, count, others)


def test_norms_and_activations() -> None:
    torch.manual_seed(1)
    x, weight = torch.randn(130, 576), torch.randn(576)
    inner = torch.randn(130, 3072)
    positions, cos_sin = torch.arange(129, -1, -1), (torch.randn(130, 64), torch.randn(130, 64))
    layout = OPS.kv_layout(1, 3, 64, 16, torch.float32)
    cache = layout.views(layout.allocate(9, torch.device("cpu")))[0]

    def rotate_and_store(rows: slice) -> Tensor:
        qkv, slots, norms = x[rows].view(-1, 9, 64), positions[rows], (weight[:64], weight[64:128])
        q = OPS.rotate_and_store(qkv, *cache, slots, positions=slots, cos_sin=cos_sin, norms=norms)
        return torch.cat((q, *(part[slots // 16, :, slots % 16] for part in layout.vectors(*cache))), 1)

    operations = {
        "rms_norm": lambda rows: OPS.rms_norm(x[rows], weight, 1e-5),
        "layer_norm": lambda rows: OPS.layer_norm(x[rows], weight, weight, 1e-5),
        "silu_and_mul": lambda rows: OPS.silu_and_mul(inner[rows]),
        "silu_and_mul, odd": lambda rows: OPS.silu_and_mul(inner[rows, :2026]),
        "gelu_tanh": lambda rows: OPS.gelu_tanh(inner[rows]),
        "gelu_tanh, odd": lambda rows: OPS.gelu_tanh(inner[rows, :1013].contiguous()),
        "gelu_tanh_and_mul": lambda rows: OPS.gelu_tanh_and_mul(inner[rows, :2026]),
        "route": lambda rows: torch.cat(OPS.route(inner[rows, :60], 4, True), -1),
        "rotate_and_store": rotate_and_store,
    }
    for name, operation in operations.items():
        torch.set_num_threads(1)
        whole = operation(slice(0, 130))
        for threads, count, first in itertools.product((1, 2, 3), (1, 2, 3, 17, 64, 101), (0, 5, 29)):
            torch.set_num_threads(threads)
            rows = slice(first, first + count)
            assert torch.equal(operation(rows), whole[rows]), (name, threads, count, first)


def test_the_setting_is_fulfilled_by_what_a_cpu_does_anyway(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A model through transformers may have products of its own, and plain torch operations promise nothing."""
    folder, invariant = save(llama(), tmp_path / "llama"), WorkerConfig(batch_invariant=True)
    cpu = torch.device("cpu")
    assert choose_ops(cpu, invariant) is choose_ops(cpu, WorkerConfig()) is OPS
    plain, flagged = (load_model(folder, config, cpu, OPS).fingerprint for config in (WorkerConfig(), invariant))
    assert plain == flagged
    with pytest.raises(ConfigError, match="--batch-invariant needs a family of Quire's own"):
        load_model(save(stablelm(), tmp_path / "stablelm"), invariant, cpu, OPS)
    monkeypatch.setattr(extension, "load", lambda: None)
    with pytest.raises(ConfigError, match="--batch-invariant needs the kernels compiled for this CPU"):
        choose_ops(cpu, invariant)
