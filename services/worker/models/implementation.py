"""`decide`: a checkpoint is served by the family of its architecture, or by transformers where that cannot read it."""

from collections.abc import Mapping
from typing import Any

from services.worker.checkpoint.config_json import UnsupportedByFamily
from services.worker.checkpoint.weight_files import WeightFiles
from services.worker.models.parameters import refuse_missing
from services.worker.models.registry import Implementation, Way, choose, fall_back, family


def decide(config: Mapping[str, Any], implementation: Implementation, files: WeightFiles | None) -> Way:
    """Return the way of a model by its config.json and the names of its tensors, if it has `files`.

    Raises ModelError naming what is wrong with it, or what its family lacks where `implementation` wants the family.
    """
    way = choose(config, implementation)
    if not way.native:
        return way
    found = family(way.architecture)
    try:
        spec = found.spec(config)
        if files is not None:
            refuse_missing(files, spec, found.names)
    except UnsupportedByFamily as error:
        return fall_back(way, implementation, error)
    return way
