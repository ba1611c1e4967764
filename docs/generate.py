"""Write the pages that are made from the code: `make docs`.

The tables of docs/settings.md and docs/from-vllm.md stand between marks, and the text around them is written by hand.
docs/vllm_flags.md is made whole.
"""

from collections.abc import Mapping
from pathlib import Path

from docs import from_vllm
from quire.settings import markdown_table
from quire.vllm import markdown_page

DOCS = Path(__file__).parent


def pages() -> dict[Path, str]:
    """Return the text of each page."""
    made = {"settings.md": {"knobs": markdown_table()}, "from-vllm.md": from_vllm.tables()}
    texts = {DOCS / name: filled(DOCS / name, tables) for name, tables in made.items()}
    return texts | {DOCS / "vllm_flags.md": markdown_page()}


def filled(page: Path, tables: Mapping[str, str]) -> str:
    """Return a page with these tables between the marks of their names."""
    text = page.read_text(encoding="utf-8")
    for name, table in tables.items():
        begin, end = f"<!-- {name}: made by `make docs` -->\n", f"<!-- end of {name} -->"
        before, first, rest = text.partition(begin)
        _, second, after = rest.partition(end)
        if not first or not second:
            raise SystemExit(f"{page}: the marks around the table {name} are missing")
        text = before + begin + table + end + after
    return text


if __name__ == "__main__":
    for page, text in pages().items():
        page.write_text(text, encoding="utf-8")
