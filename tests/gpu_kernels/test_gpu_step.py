"""A step never waits for the GPU: the real runner on the meta device, where whatever would wait raises."""

import json
import os
import subprocess
import sys
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from services.worker.models.families import gemma2, llama, opt, qwen3_moe
from services.worker.models.spec import Family
from services.worker.runner import ModelRunner
from shared.protocol import Sampling, StepPlan
from tests.gpu_kernels.meta_steps import meta_runner, random_plans, sizes


class TransferCounter(TorchDispatchMode):
    """Counts the operations that take or give tensors of both devices."""

    def __init__(self) -> None:
        super().__init__()
        self.counts: Counter[str] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **kwargs or {})
        devices = {leaf.device.type for leaf in tree_leaves((args, kwargs, result)) if isinstance(leaf, Tensor)}
        if len(devices) > 1:
            self.counts[str(func)] += 1
        return result


MODELS: dict[str, tuple[Family, dict[str, Any], int]] = {
    "llama": (llama.FAMILY, {}, 400),
    "experts": (
        qwen3_moe.FAMILY,
        {"num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 128, "norm_topk_prob": True},
        60,
    ),
    "windows, soft caps": (gemma2.FAMILY, {"sliding_window": 64, "query_pre_attn_scalar": 64}, 60),
    "biases, no rope": (
        opt.FAMILY,
        {"ffn_dim": 256, "word_embed_proj_dim": 256, "do_layer_norm_before": True, "activation_function": "relu"},
        60,
    ),
}


def sampling_of(runner: ModelRunner, plan: StepPlan) -> list[Sampling]:
    """Return the parameters of the sequences that a plan samples for, after it was launched."""
    assert runner._state is not None
    slots = [row.slot for row in plan.rows if row.samples]
    slots += [child for fork in plan.forks for child, _ in fork.children]
    return [sampling for slot in slots if (sampling := runner._state.sequences.sampling[slot])]


@pytest.mark.parametrize("name", MODELS)
def test_a_step_is_one_copy_to_the_device_and_waits_for_nothing(name: str) -> None:
    """Masks are a copy of their own, since they are made while the device computes."""
    family, config, count = MODELS[name]
    runner = meta_runner(family, **config)
    runner.configure(sizes())
    kinds: Counter[str] = Counter()
    for plan in random_plans(seed=0, count=count):
        with TransferCounter() as counter:
            step = runner.launch(plan)
        masked = any(sampling.grammar for sampling in sampling_of(runner, plan))
        assert counter.counts == {"aten.to.dtype_layout": 1 + masked}  # in inference mode, `Tensor.to` is one operation
        assert step._copy._tensors or not any(row.samples for row in plan.rows)
        assert all(tensor.is_meta for tensor in step._copy._tensors)
        kinds.update(
            forks=bool(plan.forks),
            copies=bool(plan.block_copies),
            prompts=bool(plan.new_sequences),
            decodes=all(row.count == 1 for row in plan.rows),
            chunks=any(not row.samples for row in plan.rows),
            masks=masked,
        )
    if count > 100:
        assert all(kinds[kind] > 5 for kind in ("forks", "copies", "prompts", "decodes", "chunks", "masks")), kinds


def test_nothing_is_compiled_after_the_start() -> None:
    """In a process of its own, since kernels are interpreted in this one."""
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    command = [sys.executable, "-m", "tests.gpu_kernels.meta_steps", "2000"]
    done = subprocess.run(
        command, cwd=Path(__file__).parents[2], env=environment, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    compiled = json.loads(done.stdout)
    assert compiled["steps"] == []
    assert len(compiled["warm-up"]) > 20
