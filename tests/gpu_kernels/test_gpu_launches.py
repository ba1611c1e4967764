"""A layer of a dense decoder is few launches: counted in forward passes on the meta device, where nothing runs."""

from collections import Counter
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from kernels.batch_rows import BatchRows, RowLengths
from kernels.gpu.launch import record
from kernels.load import gpu
from services.worker.checkpoint.config_json import ConfigJson
from services.worker.models.causal_lm import Inputs
from services.worker.models.decoder.decoder import Decoder
from services.worker.models.families import llama, qwen2, qwen3
from services.worker.models.parameters import RandomWeights
from services.worker.models.precision import Precision
from services.worker.models.spec import Family

META = torch.device("meta")
CONFIG = {
    "vocab_size": 100,
    "hidden_size": 512,
    "intermediate_size": 256,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
    "head_dim": 128,
    "max_position_embeddings": 8192,
}
WITHOUT_LAUNCH = ("aten.empty", "aten.new_empty", "aten._unsafe_view")


class LaunchCounter(TorchDispatchMode):
    """Counts torch's operations that launch a kernel: all but views and allocations."""

    def __init__(self) -> None:
        super().__init__()
        self.counts: Counter[str] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if not func.is_view and not str(func).startswith(WITHOUT_LAUNCH):
            self.counts[str(func)] += 1
        return func(*args, **kwargs or {})


def count_launches(
    family: Family,
    layers: int,
    tokens: int,
    rows: int,
    table: int,
    kv_dtype: torch.dtype,
    *,
    batch_invariant: bool = False,
) -> Counter[str]:
    """Return the launches of a forward pass of rows of equal length, whose block tables have `table` entries."""
    ops, dtype = gpu(batch_invariant=batch_invariant), torch.bfloat16
    spec = family.read_spec(ConfigJson({**CONFIG, "num_hidden_layers": layers}))
    precision = Precision(dtype=dtype, quantization=None, kv_dtype=kv_dtype)
    decoder = Decoder(spec, RandomWeights(spec, precision, META), ops, kv_dtype=kv_dtype)
    decoder.prepare_positions(spec.max_positions + 1)
    layout = ops.kv_layout(layers, spec.num_kv_heads, spec.head_dim, 16, kv_dtype)
    caches = layout.views(layout.allocate(64, META))
    ids = torch.empty(tokens, dtype=torch.int64, device=META)
    queries = tokens // rows
    numbers = torch.empty(rows + 1, dtype=torch.int32, device=META)
    lengths = RowLengths(queries, queries, table * layout.block_size)
    batch_rows = BatchRows(numbers, numbers[1:], numbers[1:], lengths)
    tables = torch.empty(rows, table, dtype=torch.int32, device=META)
    plan = ops.plan_attention(batch_rows, tables, block_size=layout.block_size, num_kv_heads=spec.num_kv_heads)
    # In inference mode, an operation that is made of several would be counted as one.
    with torch.no_grad(), record() as launches, LaunchCounter() as counter:
        decoder.forward(Inputs(ids, ids, ids, plan), caches)
    return counter.counts + Counter(launch.kernel for launch in launches)


@pytest.mark.parametrize("kv_dtype", [torch.bfloat16, torch.int8], ids=str)
@pytest.mark.parametrize(
    "family", [llama.FAMILY, qwen2.FAMILY, qwen3.FAMILY], ids=["llama", "biases", "norms of q and k"]
)
@pytest.mark.parametrize(
    ("tokens", "rows", "table", "limit"),
    [(8, 8, 16, 9), (8, 8, 256, 10), (600, 2, 256, 9)],
    ids=["decode", "decode, split", "chunks"],
)
def test_launches_of_a_layer(
    family: Family, tokens: int, rows: int, table: int, limit: int, kv_dtype: torch.dtype
) -> None:
    """Models of three layers and of two differ by one layer."""
    two, three = (count_launches(family, layers, tokens, rows, table, kv_dtype) for layers in (2, 3))
    layer = three - two
    assert layer.total() <= limit, layer
    assert layer["aten.mm.default"] + layer["aten.addmm.default"] == 4
    assert layer["_rotate_and_store"] == 1


def test_no_product_of_a_batch_invariant_layer_is_the_vendors() -> None:
    """It has four products, one of which has inputs enough for two segments."""
    two, three = (
        count_launches(qwen2.FAMILY, layers, 600, 2, 256, torch.bfloat16, batch_invariant=True) for layers in (2, 3)
    )
    layer = three - two
    assert layer["_multiply"] == 4
    assert layer["aten.mm.default"] == layer["aten.addmm.default"] == 0
    assert layer["_add_segments"] == 1
    assert layer.total() <= 10, layer
