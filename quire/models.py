"""`quire models`: which architectures are served, and which way one of them would go.

It reads names only: of architectures, of a folder's fields and tensors. Only a folder whose architecture has a family
needs torch, since the family is asked whether it can read this one.
"""

from importlib.metadata import version
from pathlib import Path

from services.worker.checkpoint.quantization_config import packed_format
from services.worker.models.fallback.catalog import with_replaceable_attention
from services.worker.models.registry import ARCHITECTURES, Way, choose, read_supported
from shared.errors import ModelError
from shared.hub.checkpoint import locate


def listing() -> str:
    """All architectures, as config.json names them, one a line."""
    others = sorted(with_replaceable_attention() - set(ARCHITECTURES), key=str.casefold)
    return "\n".join(
        [
            "Families of Quire's own:",
            *(f"  {name}" for name in sorted(ARCHITECTURES, key=str.casefold)),
            "",
            f"Through the modelling code of transformers {version('transformers')}, with Quire's attention:",
            *(f"  {name}" for name in others),
            "",
            "The second list is what transformers' files say of themselves. Each of these models is tried on a few",
            "tokens when it is loaded, and refused if it keeps state outside of attention or changes attention in a",
            "way that Quire lacks.",
            "",
        ]
    )


def describe(asked: str) -> str:
    """The way of a model folder, a GGUF file or an architecture. Raises `ModelError` if there is none."""
    if asked.isidentifier() and not Path(asked).is_dir():
        return _line(choose({"architectures": [_known(asked)]}))
    if not Path(asked).expanduser().exists():
        raise ModelError(f"there is no folder or file {asked}; of a model that is elsewhere, name the architecture")
    return _line(_way(locate(asked)))


def _way(folder: Path) -> Way:
    """Return the way that serving takes, by config.json alone where there are no weights."""
    config = read_supported(folder)
    way = choose(config)
    if not way.native:
        return way
    from services.worker.checkpoint.weight_files import WeightFiles
    from services.worker.models.implementation import decide  # torch, which takes seconds to import

    try:
        files = WeightFiles(folder, packed=packed_format(config))
    except ModelError:
        files = None
    try:
        return decide(config, "auto", files)
    except ModelError as error:
        raise ModelError(str(error) if str(folder) in str(error) else f"{folder}: {error}") from error


def _known(asked: str) -> str:
    """An architecture as it is written, from any beginning or spelling of its name that is meant for one of them."""
    known = [*ARCHITECTURES, *sorted(with_replaceable_attention() - set(ARCHITECTURES))]
    meant = [name for name in known if name.casefold().startswith(asked.casefold())]
    if asked in known or len(meant) == 1:
        return asked if asked in known else meant[0]
    if meant:
        raise ModelError(f"{asked} may be {', '.join(meant)}")
    return asked


def _line(way: Way) -> str:
    how = "a family of Quire's own" if way.native else "through transformers, if the model passes its trial when loaded"
    return f"{way.architecture}: {how}{f' ({way.reason})' if way.reason else ''}\n"
