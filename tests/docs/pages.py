"""Check that what a page of documentation names exists: links, anchors, commands, flags and files.

A page is Markdown text and the folder that its links start from. `problems` returns one line for each name that leads
nowhere. It reads code only (between backticks or fences) for commands and files, and prose only for links.
"""

import importlib.util
import re
from collections.abc import Iterator
from fnmatch import fnmatch
from functools import cache
from pathlib import Path

from quire.bench.options import LatencyOptions, ServeOptions, ThroughputOptions
from quire.replay import ReplayConfig
from quire.settings import CONFIGS, public_knobs
from quire.vllm import SETTINGS
from quire.vllm_settings import RENAMED
from shared.config import ModelConfig, knobs

ROOT = Path(__file__).parents[2]
SKIPPED_FOLDERS = {"__pycache__", "build", "dist"}
SUFFIXES = (".cfg", ".cpp", ".h", ".json", ".md", ".py", ".svg", ".toml", ".txt", ".yml")
"""A word in code that has a slash and ends like this is a file of the repository."""

COMMANDS: dict[str, set[str]] = {
    "serve": {knob.flag for knob in public_knobs()} | {one.flag for one in SETTINGS.values()} | {"--config"},
    "pull": {knob.flag for knob in knobs(ModelConfig)},
    "models": set(),
    "keys": set(),
    "knobs": {"--vllm"},
    "version": set(),
    "replay": {knob.flag for knob in knobs(ReplayConfig)},
    "bench serve": {knob.flag for knob in knobs(ServeOptions)},
    "bench throughput": {knob.flag for knob in knobs(ThroughputOptions)},
    "bench latency": {knob.flag for knob in knobs(LatencyOptions)},
}
OTHERS_FLAGS = {
    *("--profile", "--scale", "--target"),  # docker's
    *("--durations", "--timeout"),  # pytest's
    *("--enable-prompt-tokens-details", "--api-server-count"),  # vLLM's
}
OTHERS_MODULES = {"vllm.entrypoints.openai.api_server"}
"""What another project's page would start by `python -m`."""


def problems(text: str, folder: Path) -> list[str]:
    """Return a line for each link, command, flag or file of `text` that does not exist."""
    prose, code = split(text)
    lines = [line for line in (_broken_link(target, folder, text) for target in links(prose)) if line]
    for snippet in code:
        lines += _broken_commands(snippet)
        lines += [f"no such flag: {flag}" for flag in _flags(snippet) if flag not in all_flags()]
        lines += [f"no such file: {path}" for path in paths(snippet) if not _is_there(path, folder)]
    return lines


def anchors(text: str) -> set[str]:
    """Return the anchors of a page's headings, made as GitHub makes them."""
    slugs: set[str] = set()
    for heading in re.findall(r"^#{1,6} +(.+?) *$", re.sub(r"^```.*?^```", "", text, flags=re.M | re.S), flags=re.M):
        slug = re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-")
        number = 0
        while (anchor := f"{slug}-{number}" if number else slug) in slugs:
            number += 1
        slugs.add(anchor)
    return slugs


def split(text: str) -> tuple[str, list[str]]:
    """Return the text without its code, and each piece of code."""
    code: list[str] = []

    def take(match: re.Match[str]) -> str:
        code.append(match[1])
        return ""

    text = re.sub(r"^```[a-z]*\n(.*?)^```", take, text, flags=re.M | re.S)
    text = re.sub(r"(?:\A|(?<=\n\n))((?: {4}.*\n?)+)", take, text)
    text = re.sub(r"`([^`]+)`", lambda match: take(match) or "code", text)
    return text, [snippet.replace("\\\n", " ") for snippet in code]


def links(prose: str) -> Iterator[str]:
    for target in re.findall(r"\]\(([^)\s]+)\)", prose):
        if not target.startswith(("http://", "https://", "mailto:")):
            yield target


def _broken_link(target: str, folder: Path, text: str) -> str | None:
    path, _, anchor = target.partition("#")
    file = folder / path if path else None
    if file is not None and not file.exists():
        return f"broken link: {target}"
    if anchor and anchor not in anchors(text if file is None else file.read_text(encoding="utf-8")):
        return f"broken link: {target} (there is no such heading)"
    return None


def _broken_commands(snippet: str) -> Iterator[str]:
    for line in snippet.splitlines():
        line = line.partition(" #")[0]
        for target in re.findall(r"(?:^|&& |; )make ([a-z][a-z-]*)", line.strip()):
            if target not in make_targets():
                yield f"no such target: make {target}"
        for module in re.findall(r"\bpython3? -m ([\w.]+)", line):
            if module not in OTHERS_MODULES and not _runs_as_module(module):
                yield f"no such module: python -m {module}"
        if command := re.search(r"(?:^|/bin/|&& )quire ((?:bench )?[a-z]+)\b(.*)", line.strip()):
            flags = COMMANDS.get(command[1])
            if flags is None and not (command[1] == "bench" and not command[2].split()):
                yield f"no such command: quire {command[1]}"
            for flag in _flags(command[2]):
                if flags is not None and not _known(flag, flags):
                    yield f"no such flag: quire {command[1]} {flag}"


def _flags(code: str) -> list[str]:
    return re.findall(r"(?<![\w-])--[a-z][a-z0-9-]+", code)


def _known(flag: str, flags: set[str]) -> bool:
    return flag in flags or flag == "--help" or flag.replace("--no-", "--") in flags


def paths(code: str) -> Iterator[str]:
    for word in code.split():
        word = word.strip("\"'(),;:").partition("::")[0].partition("#")[0]
        if word.startswith(("/", "~", ".venv/", ".peers/", "http", "-")) or not re.fullmatch(r"[\w./*-]+", word):
            continue
        first, slash, _ = word.partition("/")
        if slash and (first == "." or (ROOT / first).is_dir() or word.endswith(SUFFIXES)):
            yield word.removeprefix("./")
        elif not slash and word.endswith((".py", ".cpp")):
            yield word


def _is_there(path: str, folder: Path) -> bool:
    """Return whether `path` leads somewhere from the root, the page's folder or any folder of the repository."""
    if (ROOT / path).exists() or (folder / path).exists():
        return True
    pattern = path.rstrip("/")
    return any(fnmatch(file, pattern) or fnmatch(file, f"*/{pattern}") for file in files())


def _runs_as_module(module: str) -> bool:
    path = ROOT / Path(*module.split("."))
    if path.with_suffix(".py").exists() or (path / "__main__.py").exists():
        return True
    return not (ROOT / module.split(".")[0]).exists() and importlib.util.find_spec(module) is not None


@cache
def make_targets() -> set[str]:
    return set(re.findall(r"^([a-z][a-z-]*):", (ROOT / "Makefile").read_text(encoding="utf-8"), flags=re.M))


@cache
def files() -> list[str]:
    """Return files and folders of the repository, relative to its root, without what is hidden or built."""
    tops = [path for path in ROOT.iterdir() if path.name == ".ci" or not path.name.startswith(".")]
    relative = [path.relative_to(ROOT) for top in tops for path in (top, *top.rglob("*"))]
    return [str(path) for path in relative if not SKIPPED_FOLDERS.intersection(path.parts)]


@cache
def all_flags() -> set[str]:
    """Return every flag that some program of the repository, or one that the pages speak of, takes."""
    flags = set[str]().union(*COMMANDS.values(), OTHERS_FLAGS, {"--help"})
    flags |= {knob.flag for config in CONFIGS for knob in knobs(config)}
    flags |= {f"--{name.replace('_', '-')}" for name in RENAMED}
    flags |= {flag.replace("--", "--no-", 1) for flag in flags}
    for script in [*(ROOT / "benchmarks").rglob("*.py"), *(ROOT / "kernels/cpu").glob("*.py"), *ROOT.glob("docs/*.py")]:
        flags |= set(re.findall(r"--[a-z][a-z0-9-]+", script.read_text(encoding="utf-8")))
    return flags
