"""Write the pages that are made from the code: `make docs`.

The table of docs/settings.md stands between two marks, and the text around it is written by hand. docs/vllm_flags.md is
made whole.
"""

from pathlib import Path

from quire.settings import markdown_table
from quire.vllm import markdown_page

DOCS = Path(__file__).parent
BEGIN, END = "<!-- knobs: made by `make docs` -->\n", "<!-- end of knobs -->"


def main() -> None:
    """Write both pages anew."""
    page = DOCS / "settings.md"
    before, begin, rest = page.read_text(encoding="utf-8").partition(BEGIN)
    _, end, after = rest.partition(END)
    if not begin or not end:
        raise SystemExit(f"{page}: the marks around the table of settings are missing")
    page.write_text(before + begin + markdown_table() + end + after, encoding="utf-8")
    (DOCS / "vllm_flags.md").write_text(markdown_page(), encoding="utf-8")


if __name__ == "__main__":
    main()
