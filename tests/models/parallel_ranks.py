"""Computes models on several ranks, in a process each that knows nothing but their folders."""

import multiprocessing
from collections.abc import Sequence
from contextlib import closing
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from services.worker.parallel_config import ParallelConfig
from tests.models.forward import Forward

TOKENS = torch.randint(3, 131, (2, 33), generator=torch.Generator().manual_seed(1)).tolist()
"""Two sequences."""

BLOCKS = [17, 3, 40, 8, 63, 0, 22, 5, 31], [12, 50, 7, 1, 33, 62, 9, 28, 2]
PROMPT = 24


class Case(NamedTuple):
    """A model to compute, and the settings and the adapter to use."""

    name: str
    folder: Path
    config: dict[str, Any] = {}
    adapter: Path | None = None


def compute(case: Case, parallel: ParallelConfig, rendezvous: str) -> Tensor:
    """Return logits (T, V) of the first sequence: of its prompt, which comes in two pieces beside the other sequence's,
    and of the tokens behind it, one by one.
    """
    forward = Forward(
        case.folder,
        rank=parallel.rank,
        tensor_parallel_size=parallel.tensor_parallel_size,
        pipeline_parallel_size=parallel.pipeline_parallel_size,
        rendezvous=rendezvous,
        enable_lora=case.adapter is not None,
        **case.config,
    )
    if case.adapter:
        forward.adapters.load(7, str(case.adapter))
    forward.group.connect(f"{case.name}.ranks")
    with closing(forward.group):
        if case.adapter:
            forward.adapters.put(0, 7)
        for slot, (tokens, blocks) in enumerate(zip(TOKENS, BLOCKS, strict=True)):
            forward.enter(slot, tokens, blocks, adapter_slot=0 if case.adapter and slot == 0 else -1)
        logits = [forward.step((0, 0, 11), (1, 0, 7))[0], forward.step((1, 7, 17), (0, 11, PROMPT - 11))[1]]
        logits += [forward.step((0, index, 1), (1, index, 1))[0] for index in range(PROMPT, len(TOKENS[0]))]
        together, alone = torch.cat(logits), forward.step((0, 0, len(TOKENS[0])))[0]
    assert torch.equal(together, alone), "a row's bits depend on the other rows, or on the pieces of the prompt"
    return together


def compute_all(cases: Sequence[Case], tp: int, pp: int, folder: Path) -> dict[str, Tensor]:
    """Return the logits of each case as the ranks of the last stage compute them, which must have the same bits."""
    context = multiprocessing.get_context("spawn")
    places = [ParallelConfig(rank, tp, pp) for rank in range(tp * pp)]
    processes = [context.Process(target=_run, args=(cases, place, folder)) for place in places]
    for process in processes:
        process.start()
    for process in processes:
        process.join()
    assert [process.exitcode for process in processes] == [0] * len(processes)
    first, *others = (torch.load(folder / f"{place.rank}.pt") for place in places if place.is_last_stage)
    for name, logits in first.items():
        assert all(torch.equal(other[name], logits) for other in others), name
    return first


def _run(cases: Sequence[Case], parallel: ParallelConfig, folder: Path) -> None:
    torch.set_num_threads(1)
    torch.save({case.name: compute(case, parallel, str(folder)) for case in cases}, folder / f"{parallel.rank}.pt")
