"""Graphs of decodes, with one that records what is launched and launches it again in place of CUDA's."""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from kernels.load import reference
from services.worker.batch import build_batch
from services.worker.decode_graphs import DecodeGraphs, graph_sizes
from services.worker.sequence_states import SequenceStates
from services.worker.transfers import StepBuffer
from shared.protocol import Configure, Epoch, NewSequence, Row, Sampling, StepPlan, pack_tokens


class Recording:
    """The capture of a device that launches a function again when its graph is run."""

    def __init__(self) -> None:
        self.captured: list[Callable[[], object]] = []
        self.runs: list[int] = []

    def __call__(self, run: Callable[[], object]) -> Callable[[], object]:
        number = len(self.captured)
        self.captured.append(run)
        run()

        def replay() -> None:
            self.runs.append(number)
            run()

        return replay


def test_sizes_are_dense_where_batches_are_small() -> None:
    assert graph_sizes(1) == [1]
    assert graph_sizes(6) == [1, 2, 4, 6]
    assert graph_sizes(27) == [1, 2, 4, 8, 16, 24, 27]
    assert graph_sizes(4096)[-2:] == [504, 512]


def test_a_batch_runs_the_next_larger_graph() -> None:
    forwards: list[int] = []
    offset = 0.0

    def forward(size: int) -> Tensor:
        forwards.append(size)
        return torch.arange(size * 3.0).view(size, 3) + offset

    recording = Recording()
    graphs = DecodeGraphs([1, 2, 4, 8], forward, recording)
    assert forwards == [8, 4, 2, 1], "the largest comes first"
    hidden = graphs.run(graphs.size_for(build_batch([Row(slot, 5, 1, 1) for slot in range(3)])))
    assert (recording.runs, hidden.shape) == ([1], (4, 3))
    offset = 100.0
    again = graphs.run(4)
    assert again.data_ptr() == hidden.data_ptr() == graphs.run(1).data_ptr(), "results lie at one address"
    assert again[0, 0] == 100


@pytest.mark.parametrize("counts", [[1, 2], [7], [1] * 9], ids=str)
def test_other_batches_run_none(counts: list[int]) -> None:
    graphs = DecodeGraphs([1, 2, 4, 8], lambda size: torch.zeros(size, 1), Recording())
    assert graphs.size_for(build_batch([Row(slot, 0, count, 1) for slot, count in enumerate(counts)])) == 0


def test_rows_that_fill_up_a_graph_have_no_token_and_write_nothing() -> None:
    sizes = Configure(
        epoch=Epoch("", 0), block_size=4, num_blocks=8, max_num_seqs=4, max_model_len=20, max_num_batched_tokens=16
    )
    states, buffer = SequenceStates(sizes, 100, torch.device("cpu")), StepBuffer(torch.device("cpu"))
    sampling = Sampling(max_tokens=1, seed=0)
    new = [NewSequence(slot, pack_tokens([10 + slot] * 6), 6, [2 * slot, 2 * slot + 1], sampling, 0) for slot in (0, 2)]
    changes = states.stage(StepPlan(sizes.epoch, 0, rows=[], new_sequences=new), buffer)
    rows = build_batch([Row(2, 5, 1, 1)]).stage(states, changes, padded_to=3)
    changes.apply(reference())
    tokens, _, slot_mapping = reference().prepare_inputs(
        rows, states.tokens, states.block_tables, num_tokens=3, block_size=4
    )
    assert rows.offsets.tolist() == [0, 1, 1, 1]
    assert tokens.tolist() == [12, 0, 0]
    assert slot_mapping.tolist() == [5 * 4 + 1, -1, -1]
