"""What a plan says is spread over the device's arrays as the reference does it."""

import pytest
import torch

from kernels.batch_rows import BatchRows
from kernels.cpu import prepare as cpu
from kernels.gpu import prepare
from kernels.reference import prepare as reference

ROWS = {
    "one token": [(7, 1)],
    "decodes": [(start, 1) for start in range(0, 900, 60)],
    "chunks": [(0, 300), (16, 5), (299, 1), (3, 130)],
    "many": [(row % 40, 1 + row % 7 * (row % 3 == 0)) for row in range(70)],
}


@pytest.mark.parametrize("name", ROWS)
@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
def test_inputs_are_the_references(name: str, dtype: torch.dtype, device: torch.device) -> None:
    """Slots are in any order, and tables and tokens are wider than any sequence."""
    torch.manual_seed(0)
    starts, counts = (torch.tensor(column) for column in zip(*ROWS[name], strict=True))
    offsets = torch.cat((torch.zeros(1, dtype=torch.int64), counts.cumsum(0)))
    slots = torch.randperm(len(starts) + 5)[: len(starts)]
    rows = BatchRows.of(offsets.to(dtype), starts.to(dtype), slots.to(dtype))
    tokens = torch.randint(0, 1000, (len(starts) + 5, 1003), dtype=torch.int32)
    tables = torch.randint(0, 500, (len(starts) + 5, 130), dtype=torch.int32)
    total = int(offsets[-1])
    expected = reference.prepare_inputs(rows, tokens, tables, num_tokens=total, block_size=8)
    token_of = [(slot, start + i) for slot, (start, count) in zip(slots, ROWS[name], strict=True) for i in range(count)]
    assert expected[0].tolist() == [int(tokens[slot, position]) for slot, position in token_of]
    assert expected[1].tolist() == [position for _, position in token_of]
    assert expected[2].tolist() == [int(tables[slot, at // 8]) * 8 + at % 8 for slot, at in token_of]

    arguments = rows.to(device), tokens.to(device), tables.to(device)
    got = prepare.prepare_inputs(*arguments, num_tokens=total, block_size=8)
    on_cpu = cpu.prepare_inputs(rows, tokens, tables, num_tokens=total, block_size=8)
    for ours, cpus, wanted in zip(got, on_cpu, expected, strict=True):
        assert ours.dtype == cpus.dtype == wanted.dtype
        assert ours.tolist() == cpus.tolist() == wanted.tolist()


@pytest.mark.parametrize("counts", [[1, 1, 1, 0, 0], [3, 0, 2, 0], [0, 0]], ids=str)
def test_what_follows_the_rows_is_padding(counts: list[int], device: torch.device) -> None:
    """Rows without tokens may stand anywhere."""
    offsets = torch.tensor([0, *counts]).cumsum(0)
    rows = BatchRows.of(offsets, torch.arange(len(counts)) * 3)
    tokens = torch.arange(500, dtype=torch.int32).view(5, 100)
    tables = torch.arange(40, dtype=torch.int32).view(5, 8)
    arguments = tokens[: len(counts)], tables[: len(counts)]
    expected = reference.prepare_inputs(rows, *arguments, num_tokens=9, block_size=16)
    used = sum(counts)
    assert [part[used:].tolist() for part in expected] == [[0] * (9 - used), [0] * (9 - used), [-1] * (9 - used)]
    got = prepare.prepare_inputs(rows.to(device), *(part.to(device) for part in arguments), num_tokens=9, block_size=16)
    assert [part.tolist() for part in got] == [part.tolist() for part in expected]


@pytest.mark.parametrize("within", [False, True])
def test_segments(within: bool, device: torch.device) -> None:
    """Of lengths around the kernel's block, from another tensor or within one; what lies between them stays."""
    lengths, gap = [1, 0, 1023, 1024, 1025, 3000, 7], 5
    segments, at = [], 0
    for index, length in enumerate(lengths):
        segments.append((20_000 + at, at + index, length))
        at += length + gap
    table = torch.tensor(segments)
    source = torch.arange(40_000, dtype=torch.int32)
    destination = source.clone() if within else -source
    expected = destination.clone()
    for first, begin, length in segments:
        expected[first : first + length] = source[begin : begin + length]
    for operations, where in ((prepare, device), (reference, torch.device("cpu")), (cpu, torch.device("cpu"))):
        written = destination.clone().to(where)
        operations.copy_segments(written, written if within else source.to(where), table.to(where), max(lengths))
        assert torch.equal(written.cpu(), expected)
