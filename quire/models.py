"""`quire models`: lists the supported architectures, and tells which implementation would serve a model.

It reads config.json and the names of tensors, never weights. It imports torch only for a folder whose architecture has
a family, since the family checks that it can read this model.
"""

from importlib.metadata import version
from pathlib import Path

from services.worker.checkpoint.config_json import ConfigJson
from services.worker.models.fallback.catalog import with_replaceable_attention
from services.worker.models.registry import ARCHITECTURES, Implementation, choose_implementation, read_supported
from shared.errors import ModelError
from shared.hub.checkpoint import locate


def listing() -> str:
    """Return all architectures, as config.json names them, one a line."""
    others = sorted(with_replaceable_attention() - set(ARCHITECTURES), key=str.casefold)
    return "\n".join(
        [
            "Families of Quire's own:",
            *(f"  {name}" for name in sorted(ARCHITECTURES, key=str.casefold)),
            "",
            f"Through the modelling code of transformers {version('transformers')}, with Quire's attention:",
            *(f"  {name}" for name in others),
            "",
            "The second list is read from the files of transformers. Each of these models is tried on a few tokens",
            "when it is loaded, and refused if it keeps state outside of attention or changes attention in a way that",
            "Quire does not support.",
            "",
        ]
    )


def describe(model: str) -> str:
    """Return a line about a model folder, a GGUF file or an architecture. Raise `ModelError` if it is not supported."""
    if model.isidentifier() and not Path(model).is_dir():
        return _line(choose_implementation(ConfigJson({"architectures": [_complete(model)]})))
    if not Path(model).expanduser().exists():
        raise ModelError(f"there is no folder or file {model}; for a model that is elsewhere, name its architecture")
    return _line(_implementation(locate(model)))


def _implementation(path: Path) -> Implementation:
    """Return the implementation that would serve a model folder. Without weights, config.json alone decides."""
    folder, implementation = read_supported(path)
    if not implementation.native:
        return implementation
    from services.worker.checkpoint.weight_files import WeightFiles
    from services.worker.models.load import match_family  # torch, which takes seconds to import

    try:
        files = WeightFiles(folder)
    except ModelError:
        files = None
    try:
        implementation, _ = match_family(folder.config, implementation, "auto", files)
        return implementation
    except ModelError as error:
        raise ModelError(str(error) if str(path) in str(error) else f"{path}: {error}") from error


def _complete(name: str) -> str:
    """Return the architecture that begins with `name` in any case, or else `name`. Raise `ModelError` for several."""
    architectures = [*ARCHITECTURES, *sorted(with_replaceable_attention() - set(ARCHITECTURES))]
    if name in architectures:
        return name
    matches = [architecture for architecture in architectures if architecture.casefold().startswith(name.casefold())]
    if len(matches) > 1:
        raise ModelError(f"{name} may be {', '.join(matches)}")
    return matches[0] if matches else name


def _line(implementation: Implementation) -> str:
    if implementation.native:
        code = "a family of Quire's own"
    else:
        code = "through transformers, if the model passes its sanity check when loaded"
    return f"{implementation.architecture}: {code}{f' ({implementation.reason})' if implementation.reason else ''}\n"
