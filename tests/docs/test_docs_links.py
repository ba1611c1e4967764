"""Tests that everything the documentation names exists: links and their anchors, commands, flags and files."""

import re
from pathlib import Path

import pytest

from tests.docs.pages import ROOT, anchors, links, paths, problems, split

PAGES = sorted(
    [*ROOT.glob("*.md"), *ROOT.glob("docs/*.md"), *ROOT.glob("tests/*.md"), *ROOT.glob("benchmarks/*.md")],
    key=str,
)
OTHERS_FILES = {
    "docs/compatibility.md": r"no such file: (tests/entrypoints/.*|(models|instrumentator|middleware)/.*|[^/]+\.py)"
}
"""Pages that name another project's files, and the complaints about those."""

SOUND = """\
# A page

[code](shared/protocol.py), [a page](docs/settings.md#settings), [here](#a-page), [out](https://example.org/x#y)

    make test
    .venv/bin/python -m services.gateway --engines tcp://host:1

`quire serve facebook/opt-125m --no-async-scheduling`, `quire bench serve --port 8000`, `python -m pytest tests/core`,
`services/gateway/`, `POST /v1/models`, `owner/name`, `pages.py` and `make`.
"""


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_what_a_page_names_exists(page: Path) -> None:
    foreign = OTHERS_FILES.get(str(page.relative_to(ROOT)), "nothing")
    lines = problems(page.read_text(encoding="utf-8"), page.parent)
    assert [line for line in lines if not re.fullmatch(foreign, line)] == []


def test_a_sound_text_has_no_problems() -> None:
    assert problems(SOUND, ROOT) == []


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("[a](docs/nowhere.md)", "broken link: docs/nowhere.md"),
        ("[a](docs/settings.md#nowhere)", "broken link: docs/settings.md#nowhere (there is no such heading)"),
        ("# One\n[a](#two)", "broken link: #two (there is no such heading)"),
        ("![a](benchmarks/nowhere.svg)", "broken link: benchmarks/nowhere.svg"),
        ("```\nmake tests\n```", "no such target: make tests"),
        ("Run `make no-such-thing`.", "no such target: make no-such-thing"),
        ("    python -m services.nowhere\n", "no such module: python -m services.nowhere"),
        (
            "`.venv/bin/python -m services.gateway.app.nowhere`",
            "no such module: python -m services.gateway.app.nowhere",
        ),
        ("`python -m quire_nowhere`", "no such module: python -m quire_nowhere"),
        ("`quire server`", "no such command: quire server"),
        ("`quire bench everything`", "no such command: quire bench everything"),
        ("```\n.venv/bin/quire serve model \\\n  --no-such-flag 1\n```", "no such flag: quire serve --no-such-flag"),
        ("`quire pull MODEL --port 8000`", "no such flag: quire pull --port"),
        ("`--max-num-sequences`", "no such flag: --max-num-sequences"),
        ("`services/gateway/nowhere.py`", "no such file: services/gateway/nowhere.py"),
        ("`tests/nowhere`", "no such file: tests/nowhere"),
        ("`no_such_module.py`", "no such file: no_such_module.py"),
    ],
)
def test_what_leads_nowhere_is_named(text: str, problem: str) -> None:
    assert problem in problems(text, ROOT)


def test_the_pages_are_found_and_read() -> None:
    """Without this test, checks that see no link and no file would pass as well."""
    pages = [split(page.read_text(encoding="utf-8")) for page in PAGES]
    assert len(PAGES) > 12
    assert sum(len(list(links(prose))) for prose, _ in pages) > 60
    assert sum(len(list(paths(snippet))) for _, code in pages for snippet in code) > 60


def test_anchors_are_those_of_github() -> None:
    assert anchors("# `quire serve`: *one* server\n\n```\n# no\n```\n## A\n## A\n") == {
        "quire-serve-one-server",
        "a",
        "a-1",
    }


def _glossary() -> list[list[tuple[str, Path]]]:
    """Return each table of the glossary: the word and the file of each row."""
    tables = (ROOT / "docs/glossary.md").read_text(encoding="utf-8").split("|---|---|---|---|\n")[1:]
    rows = [re.findall(r"^\| (.+?) \| .+\]\((.+)\) \|$", table, flags=re.M) for table in tables]
    return [[(word, ROOT / "docs" / file) for word, file in table] for table in rows]


def test_the_glossary_is_in_alphabetical_order() -> None:
    tables = [[word.replace("`", "").lower() for word, _ in table] for table in _glossary()]
    assert sum(map(len, tables)) > 80
    assert tables == [sorted(table) for table in tables]


def test_a_name_in_the_glossary_stands_in_the_file_of_its_row() -> None:
    names = [(name, file) for table in _glossary() for word, file in table for name in re.findall(r"`(\w+)`", word)]
    assert len(names) > 30
    assert [name for name, file in names if not re.search(rf"\b{name}\b", file.read_text(encoding="utf-8"))] == []
