"""A step never waits for the GPU: the real runner on the meta device, where whatever would wait raises."""

from collections import Counter
from typing import Any

from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

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


def test_a_step_is_one_copy_to_the_device_and_waits_for_nothing() -> None:
    runner = meta_runner()
    runner.configure(sizes())
    kinds: Counter[str] = Counter()
    for plan in random_plans(seed=0, count=400):
        with TransferCounter() as counter:
            step = runner.launch(plan)
        assert counter.counts == {"aten.to.dtype_layout": 1}  # in inference mode, `Tensor.to` is one operation
        assert step._copy._tensors or not any(row.samples for row in plan.rows)
        assert all(tensor.is_meta for tensor in step._copy._tensors)
        kinds.update(
            forks=bool(plan.forks),
            copies=bool(plan.block_copies),
            prompts=bool(plan.new_sequences),
            decodes=all(row.count == 1 for row in plan.rows),
            chunks=any(not row.samples for row in plan.rows),
        )
    assert all(kinds[kind] > 5 for kind in ("forks", "copies", "prompts", "decodes", "chunks")), kinds
