"""Run a program with the packages of one dependency group of pyproject.toml and no others.

    python tests/deploy/dependency_groups.py GROUP MODULE [ARGUMENT...]

runs MODULE as `python -m MODULE` would, while a package that GROUP does not install cannot be imported. The folder of
this file is on the path, but the root of the repository is not: PYTHONPATH names the code to run.
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
    """Return the requirements of a group, including those of the groups that it includes."""
    lines: list[str] = []
    for entry in PYPROJECT["dependency-groups"][group]:
        lines += requirements(entry["include-group"]) if isinstance(entry, dict) else [entry]
    return lines


def installed_by(lines: Iterable[str]) -> set[str]:
    """Return the normalised names of the distributions here that pip would install for these requirements."""
    names: set[str] = set()
    waiting = [(requirement, frozenset[str]()) for requirement in map(Requirement, lines)]
    while waiting:
        requirement, extras = waiting.pop()
        if requirement.marker and not any(requirement.marker.evaluate({"extra": extra}) for extra in extras or {""}):
            continue
        name = normalised(requirement.name)
        if name in names and not requirement.extras:
            continue
        try:
            needs = requires(name) or []
        except PackageNotFoundError:
            continue
        names.add(name)
        waiting += [(Requirement(need), frozenset({"", *requirement.extras})) for need in needs]
    return names


def normalised(name: str) -> str:
    return re.sub(r"[-_.]+", "-", name).lower()


class Absent(MetaPathFinder):
    """An import hook that raises for some top-level modules, as if they were not installed."""

    def __init__(self, modules: Iterable[str]) -> None:
        self._modules = frozenset(modules)

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if fullname.partition(".")[0] in self._modules:
            raise ModuleNotFoundError(f"No module named {fullname!r} (not in the dependency group)", name=fullname)
        return None


def absent(group: str) -> set[str]:
    """Return the top-level modules installed here that the group does not install, apart from Quire's own."""
    installed = installed_by(requirements(group))
    ours = {"quire", "services", "shared", "kernels"}
    return {
        module
        for module, owners in packages_distributions().items()
        if module not in ours and not installed & {normalised(owner) for owner in owners}
    }


def main(group: str, module: str, *arguments: str) -> None:
    """Run `module` in this process with the packages of `group`."""
    modules = absent(group)
    for name in [name for name in sys.modules if name.partition(".")[0] in modules]:
        del sys.modules[name]
    sys.meta_path.insert(0, Absent(modules))
    sys.argv = [module, *arguments]
    runpy.run_module(module, run_name="__main__", alter_sys=True)


def declared() -> list[Any]:
    """Return the project's own dependencies."""
    return list(PYPROJECT["project"]["dependencies"])


def extra(name: str) -> list[Any]:
    """Return the dependencies of one of the project's extras."""
    return list(PYPROJECT["project"]["optional-dependencies"][name])


if __name__ == "__main__":
    main(*sys.argv[1:])
