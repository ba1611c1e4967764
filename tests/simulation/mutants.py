"""Mutants: the real code with the text of some of its functions replaced."""

import importlib
import inspect
import textwrap
from collections.abc import Iterator
from contextlib import contextmanager

import pytest

CORE = "services.scheduler.core"


@contextmanager
def mutated(package: str, changes: list[tuple[str, str, str]]) -> Iterator[None]:
    """Run the block with the text of some of a package's functions changed.

    A change is where ("module:Class.method" or "module:function"), a text that occurs there once, and its replacement.
    """
    with pytest.MonkeyPatch.context() as patch:
        texts: dict[str, str] = {}
        for where, old, new in changes:
            where = f"{package}.{where}"
            text = texts.get(where) or _source(where)
            assert text.count(old) == 1, f"{where} has changed: {old!r}"
            texts[where] = text.replace(old, new)
        for where, text in texts.items():
            _replace(patch, where, text)
        yield


def _source(where: str) -> str:
    module, _, path = where.partition(":")
    function = importlib.import_module(module)
    for name in path.split("."):
        function = getattr(function, name)
    if isinstance(function, property):
        function = function.fget
    return textwrap.dedent(inspect.getsource(function))


def _replace(patch: pytest.MonkeyPatch, where: str, text: str) -> None:
    module_name, _, path = where.partition(":")
    module = importlib.import_module(module_name)
    owner, _, name = path.rpartition(".")
    namespace: dict[str, object] = {}
    exec(compile(text, where, "exec"), vars(module), namespace)
    if owner:
        patch.setattr(getattr(module, owner), name, namespace[name])
        return
    patch.setattr(module, name, namespace[name])
    if (scheduler := importlib.import_module(f"{CORE}.scheduler")) and hasattr(scheduler, name):
        patch.setattr(scheduler, name, namespace[name])  # a module that imported the function by its name
