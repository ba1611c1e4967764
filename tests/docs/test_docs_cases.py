"""Tests that each case of docs/cases.md is in one table, and that its tests exist and have its id."""

import ast
import re
from functools import cache
from pathlib import Path
from typing import NamedTuple

import pytest

from tests.docs.pages import ROOT

PAGE = (ROOT / "docs/cases.md").read_text(encoding="utf-8")
ROWS = re.findall(r"^\| ([A-Z0-9]+-\d\d) \| (.+) \| (.+) \|$", PAGE, flags=re.M)
PREFIXES = sorted({id.partition("-")[0] for id, _, _ in ROWS})
ID = re.compile(rf"\b(?:{'|'.join(PREFIXES)})-\d\d\b")
NOT_APPLICABLE = "–"


class Proof(NamedTuple):
    """A test function, and the ids in its docstring and in that of its module."""

    name: str
    ids: frozenset[str]


@cache
def proofs_in(file: str) -> dict[str, Proof]:
    """Return the tests of the file with this name, by their names. Fail if there is none, or if there are several."""
    (path,) = (ROOT / "tests").rglob(file)
    return {test.name: test for test in read_tests(path)}


def read_tests(path: Path) -> list[Proof]:
    module = ast.parse(path.read_text(encoding="utf-8"))
    functions = [node for node in module.body if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef))]
    ids = ID.findall(ast.get_docstring(module) or "")
    return [
        Proof(function.name, frozenset([*ids, *ID.findall(ast.get_docstring(function) or "")]))
        for function in functions
        if function.name.startswith("test_")
    ]


def test_each_case_is_in_one_table() -> None:
    ids = [id for id, _, _ in ROWS]
    assert len(ids) == len(set(ids))
    (total,) = re.findall(r"Each of the (\d+)\s+cases", PAGE)
    assert len(ids) == int(total)
    assert len(ids) == PAGE.count("\n| ") - PAGE.count("\n| case |"), "each row of a table is one"


@pytest.mark.parametrize(("id", "must_hold", "proof"), ROWS, ids=[id for id, _, _ in ROWS])
def test_its_tests_have_its_id(id: str, must_hold: str, proof: str) -> None:
    """A case without a test says why."""
    names = re.findall(r"`(test_\w+\.py)::(test_\w+)`", proof)
    assert ", ".join(f"`{file}::{name}`" for file, name in names) == proof.replace(NOT_APPLICABLE, "")
    assert names or "not supported" in must_hold
    for file, name in names:
        assert name in proofs_in(file), f"{file} has no {name}"
        assert id in proofs_in(file)[name].ids, f"{id} is not in the docstring of {name}"


def test_each_id_of_a_test_is_a_case() -> None:
    found = {id for path in (ROOT / "tests").rglob("test_*.py") for test in read_tests(path) for id in test.ids}
    assert len(found) > 150
    assert found - {id for id, _, _ in ROWS} == set()
