"""`quire models`: which architectures are served, and which way one of them would go.

It reads names only, and imports neither torch nor transformers.
"""

from importlib.metadata import version
from pathlib import Path

from services.worker.models.fallback.catalog import with_replaceable_attention
from services.worker.models.registry import ARCHITECTURES, Way, choose, read_supported
from shared.errors import ModelError


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
    """The way of a model folder or of an architecture. Raises `ModelError` if there is none."""
    folder = Path(asked).expanduser()
    if folder.is_dir():
        return _line(choose(read_supported(folder)))
    if not asked.isidentifier():
        raise ModelError(f"there is no folder {asked}, and an architecture's name looks otherwise")
    return _line(choose({"architectures": [asked]}))


def _line(way: Way) -> str:
    how = "a family of Quire's own" if way.native else "through transformers, if the model passes its trial when loaded"
    return f"{way.architecture}: {how}\n"
