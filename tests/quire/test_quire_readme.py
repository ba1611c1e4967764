"""Tests that every setting says what it means, and that the files and flags that the documentation names exist."""

import re
from pathlib import Path

from quire.bench.options import LatencyOptions, ServeOptions, ThroughputOptions
from quire.settings import public_knobs
from quire.vllm import SETTINGS
from shared.config import knobs

ROOT = Path(__file__).parents[2]
TEXT = "".join(
    (ROOT / page).read_text(encoding="utf-8")
    for page in (
        "README.md",
        *(
            f"docs/{name}.md"
            for name in ("api", "benchmarks", "clients", "deploy", "models", "quantization", "settings")
        ),
    )
)
"""The README and the pages for users that continue it."""


def test_every_setting_says_what_it_means() -> None:
    assert [knob.name for knob in public_knobs() if not knob.doc.endswith(".")] == []


def test_files_and_flags_that_it_names_exist() -> None:
    named = re.findall(r"`((?:services|shared|kernels|docs|quire|deploy|benchmarks)/[\w/.]*)`", TEXT)
    assert len(named) > 5
    assert [path for path in named if not (ROOT / path).exists()] == []
    others = {"--config", "--port", "--scale", "--profile"}  # the last two are compose's
    others |= {"--engines", "--gateways", "--workers", "--scheduler", "--insecure", "--zmq-keys"}  # the services' own
    others |= {"--admin-port"}  # the same
    others |= {"--vllm", "--help"}  # of `quire knobs`, and of every command
    others |= {"--quick", "--large"}  # of `make bench-peers`
    others |= {"--request", "--trace"}  # of `quire replay`
    flags = set(re.findall(r"--[a-z][a-z-]+", TEXT)) - others
    measuring = [knob for options in (ServeOptions, ThroughputOptions, LatencyOptions) for knob in knobs(options)]
    assert flags <= {knob.flag for knob in [*public_knobs(), *measuring]} | {one.flag for one in SETTINGS.values()}
