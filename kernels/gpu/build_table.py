"""The table that `build.py` writes, and reads again as the budgets of the next build."""

from collections.abc import Mapping, Sequence
from typing import NamedTuple

INTRODUCTION = """# The GPU's kernels, as compiled

Written by `make kernels`, which compiles every kernel and configuration without a GPU. No row was measured: registers
and stack are read from the object, instructions from its PTX, and the floor is the time that an H200 needs at least,
by its data sheet (4.8 TB/s, 989 TFLOP/s), for the bytes and operations of the shape. A build that needs more registers
or shared memory than a row has recorded fails.
"""

HEADINGS = (
    "module",
    "configuration",
    "kernel",
    "warps",
    "stages",
    "registers",
    "stack, B",
    "shared, B",
    "blocks an SM",
    "matrix instructions",
    "cp.async",
    "TMA",
    "two-byte loads",
    "shape",
    "MB moved",
    "floor, µs",
)


class Row(NamedTuple):
    """An object, and the configuration that it is compiled for. Fields stand in the order of the headings."""

    module: str
    configuration: str
    kernel: str
    warps: int
    stages: int
    registers: int
    stack: int
    shared: int
    blocks: int
    matrix: str
    copies: int
    tma: int
    two_byte_loads: int
    shape: str
    megabytes: str
    floor: str

    @property
    def name(self) -> str:
        return f"{self.module}: {self.configuration}: {self.kernel}"


Table = dict[int, list[Row]]
"""Rows by compute capability."""


def write(table: Mapping[int, Sequence[Row]]) -> str:
    """Return the table as Markdown, an architecture a section."""
    sections = [INTRODUCTION]
    for architecture in sorted(table):
        lines = [HEADINGS, ["---"] * len(HEADINGS), *table[architecture]]
        text = "".join(f"| {' | '.join(map(str, line))} |\n" for line in lines)
        sections.append(f"## sm_{architecture}\n\n{text}")
    return "\n".join(sections)


def read(text: str) -> Table:
    """Return what `write` has written."""
    table: Table = {}
    rows: list[Row] = []
    for line in text.splitlines():
        if line.startswith("## sm_"):
            rows = table[int(line.removeprefix("## sm_"))] = []
        elif line.startswith("| ") and not line.startswith(("| module", "| ---")):
            cells = [cell.strip() for cell in line[1:-1].split("|")]
            types = Row.__annotations__.values()
            rows.append(Row(*(kind(cell) for kind, cell in zip(types, cells, strict=True))))
    return table


def exceeded(table: Mapping[int, Sequence[Row]], recorded: Mapping[int, Sequence[Row]]) -> list[str]:
    """Return a line for each row that needs more registers or shared memory than the recorded one of its name."""
    problems = []
    for architecture, rows in table.items():
        budgets = {row.name: row for row in recorded.get(architecture, ())}
        for row in rows:
            budget = budgets.get(row.name, row)
            if row.registers > budget.registers:
                problems.append(f"sm_{architecture}: {row.name}: {row.registers} registers, not {budget.registers}")
            if row.shared > budget.shared:
                problems.append(f"sm_{architecture}: {row.name}: {row.shared} B of shared memory, not {budget.shared}")
    return problems
