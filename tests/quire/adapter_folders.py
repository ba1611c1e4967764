"""Folders of adapters of the tests' tiny model, made by PEFT."""

from pathlib import Path

from transformers import OPTForCausalLM

from tests.models.peft_adapters import make_adapter, set_adapter_config

NAMES = ("adapter_1", "adapter_2", "adapter_3", "adapter_4")


def make_adapters(model: Path, folder: Path) -> None:
    """Make an adapter of each name in `folder`, and one named `broken` that the model does not take."""
    base = OPTForCausalLM.from_pretrained(model)
    for seed, name in enumerate((*NAMES, "broken")):
        make_adapter(base, folder / name, seed=seed)
    set_adapter_config(folder / "broken", use_dora=True)
