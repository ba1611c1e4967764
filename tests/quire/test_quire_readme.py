"""The README says what is so: its table of settings is current, and the files that it names exist."""

import re
from pathlib import Path

from quire.bench.options import LatencyOptions, ServeOptions, ThroughputOptions
from quire.settings import markdown_table, public_knobs
from quire.vllm import SETTINGS
from shared.config import knobs

ROOT = Path(__file__).parents[2]
README = (ROOT / "README.md").read_text(encoding="utf-8")


def test_the_table_of_settings_is_current() -> None:
    shown = README.partition("<!-- knobs: made by `quire knobs` -->\n")[2].partition("<!-- end of knobs -->")[0]
    assert shown == markdown_table()


def test_every_setting_says_what_it_means() -> None:
    assert [knob.name for knob in public_knobs() if not knob.doc.endswith(".")] == []


def test_files_and_flags_that_it_names_exist() -> None:
    named = re.findall(r"`((?:services|shared|kernels|docs|quire)/[\w/.]*)`", README)
    assert len(named) > 5
    assert [path for path in named if not (ROOT / path).exists()] == []
    others = {"--config", "--port", "--scale", "--profile"}  # the last two are compose's
    flags = set(re.findall(r"--[a-z][a-z-]+", README)) - others
    measuring = [knob for options in (ServeOptions, ThroughputOptions, LatencyOptions) for knob in knobs(options)]
    assert flags <= {knob.flag for knob in [*public_knobs(), *measuring]} | {one.flag for one in SETTINGS.values()}
