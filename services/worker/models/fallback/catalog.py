"""Which causal language models transformers has, read from the text of its files.

Importing transformers' modelling code takes seconds and brings torch; the command line and the first checks want
neither. What is read is what transformers declares. Whether a model really runs is found out when it is loaded.
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
_CALLS = "ALL_ATTENTION_FUNCTIONS.get_interface("
_STATEFUL = re.compile(r"^    _is_stateful = True", re.MULTILINE)


def causal_models() -> frozenset[str]:
    """Names of the classes that transformers takes for causal language modelling."""
    return frozenset(causal_by_type().values())


@cache
def causal_by_type() -> Mapping[str, str]:
    """The class that transformers takes for causal language modelling, for each `model_type` of config.json."""
    path = _models() / "auto" / "modeling_auto.py"
    for node in ast.parse(path.read_text(encoding="utf-8")).body:
        if (
            isinstance(node, ast.Assign)
            and ast.unparse(node.targets[0]) == _MAPPING
            and isinstance(node.value, ast.Call)
        ):
            names: list[tuple[str, str]] = ast.literal_eval(node.value.args[0])
            return dict(names)
    raise ModelError(f"{path}: no {_MAPPING}; this version of transformers is not known to Quire")


@cache
def with_replaceable_attention() -> frozenset[str]:
    """Of `causal_models`, those whose modelling file calls the attention interface and declares no other state."""
    wanted = causal_models()
    found: set[str] = set()
    for path in _models().glob("*/modeling_*.py"):
        text = path.read_text(encoding="utf-8")
        if _CALLS in text and not _STATEFUL.search(text):
            found |= wanted.intersection(_CLASS.findall(text))
    return frozenset(found)


def _models() -> Path:
    spec = find_spec("transformers")
    if spec is None or not spec.submodule_search_locations:
        raise ModelError("transformers is not installed")
    return Path(spec.submodule_search_locations[0]) / "models"
