"""The causal language models that transformers has, read from the text of its files.

Importing transformers' modelling code takes seconds and imports torch, which the command line must avoid. The text
tells what transformers declares; only loading a model tells if it works.
"""

import ast
import re
from collections.abc import Mapping
from functools import cache
from importlib.util import find_spec
from pathlib import Path

from shared.errors import ModelError

_MAPPING = "MODEL_FOR_CAUSAL_LM_MAPPING_NAMES"
_CLASS = re.compile(r"^class (\w+)\(", re.MULTILINE)
_USES_INTERFACE = "ALL_ATTENTION_FUNCTIONS.get_interface("
_STATEFUL = re.compile(r"^    _is_stateful = True", re.MULTILINE)


def causal_models() -> frozenset[str]:
    """Return the names of the classes that transformers uses for causal language modelling."""
    return frozenset(causal_by_type().values())


@cache
def causal_by_type() -> Mapping[str, str]:
    """Return the class that transformers uses for causal language modelling, by the `model_type` of config.json."""
    path = _models() / "auto" / "modeling_auto.py"
    for node in ast.parse(path.read_text(encoding="utf-8")).body:
        if (
            isinstance(node, ast.Assign)
            and ast.unparse(node.targets[0]) == _MAPPING
            and isinstance(node.value, ast.Call)
        ):
            names: list[tuple[str, str]] = ast.literal_eval(node.value.args[0])
            return dict(names)
    raise ModelError(f"{path}: no {_MAPPING}; Quire does not know this version of transformers")


@cache
def with_replaceable_attention() -> frozenset[str]:
    """Return the `causal_models` whose modelling file calls the attention interface and declares no other state."""
    causal, replaceable = causal_models(), set[str]()
    for path in _models().glob("*/modeling_*.py"):
        text = path.read_text(encoding="utf-8")
        if _USES_INTERFACE in text and not _STATEFUL.search(text):
            replaceable |= causal.intersection(_CLASS.findall(text))
    return frozenset(replaceable)


def _models() -> Path:
    spec = find_spec("transformers")
    if spec is None or not spec.submodule_search_locations:
        raise ModelError("transformers is not installed")
    return Path(spec.submodule_search_locations[0]) / "models"
