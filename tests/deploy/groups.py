"""What pyproject.toml's dependency groups stand for, and a program run with no packages but those of one.

    python -m tests.deploy.groups GROUP MODULE [ARGUMENT...]

Runs MODULE as `python -m MODULE` would, while whatever GROUP does not install cannot be imported.
"""

import re
import runpy
import sys
import tomllib
from collections.abc import Iterable, Sequence
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec
from importlib.metadata import PackageNotFoundError, packages_distributions, requires
from pathlib import Path
from types import ModuleType
from typing import Any

from packaging.requirements import Requirement

ROOT = Path(__file__).resolve().parents[2]
PYPROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())


def requirements(group: str) -> list[str]:
    """The requirements of a group, those of the groups that it includes among them."""
    found: list[str] = []
    for entry in PYPROJECT["dependency-groups"][group]:
        found += requirements(entry["include-group"]) if isinstance(entry, dict) else [entry]
    return found


def installed_by(wanted: Iterable[str]) -> set[str]:
    """Normal names of the distributions that pip would install for these requirements, as far as they are there."""
    found: set[str] = set()
    waiting = [(requirement, frozenset[str]()) for requirement in map(Requirement, wanted)]
    while waiting:
        requirement, extras = waiting.pop()
        if requirement.marker and not any(requirement.marker.evaluate({"extra": extra}) for extra in extras or {""}):
            continue
        name = normal(requirement.name)
        if name in found and not requirement.extras:
            continue
        try:
            needs = requires(name) or []
        except PackageNotFoundError:
            continue
        found.add(name)
        waiting += [(Requirement(need), frozenset({"", *requirement.extras})) for need in needs]
    return found


def normal(name: str) -> str:
    return re.sub(r"[-_.]+", "-", name).lower()


class Absent(MetaPathFinder):
    """Finds nothing for some top-level modules, as if they were not installed."""

    def __init__(self, modules: Iterable[str]) -> None:
        self._modules = frozenset(modules)

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if fullname.partition(".")[0] in self._modules:
            raise ModuleNotFoundError(f"No module named {fullname!r} (not in the dependency group)", name=fullname)
        return None


def absent(group: str) -> set[str]:
    """Top-level modules that are installed here and would not be with the group alone; ours are no part of it."""
    there = installed_by(requirements(group))
    ours = {"quire", "services", "shared", "kernels"}
    return {
        module
        for module, owners in packages_distributions().items()
        if module not in ours and not there & {normal(owner) for owner in owners}
    }


def main(group: str, module: str, *arguments: str) -> None:
    """Become MODULE."""
    gone = absent(group)
    for name in [name for name in sys.modules if name.partition(".")[0] in gone]:
        del sys.modules[name]
    sys.meta_path.insert(0, Absent(gone))
    sys.argv = [module, *arguments]
    runpy.run_module(module, run_name="__main__", alter_sys=True)


def declared() -> list[Any]:
    """The project's own dependencies."""
    return list(PYPROJECT["project"]["dependencies"])


if __name__ == "__main__":
    main(*sys.argv[1:])
