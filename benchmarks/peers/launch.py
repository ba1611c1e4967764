"""`Launch`: how an installed peer is started."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

from benchmarks.peers.models import Model


class Place(NamedTuple):
    """The folder of the peers, and the model that they serve."""

    folder: Path  # each peer's environment is a folder in it
    model: Model
    checkpoint: Path  # the model as a Hugging Face folder with bfloat16 weights
    threads: int  # to compute with: every core

    @property
    def name(self) -> str:
        """Return the model's name in requests."""
        return self.model.key


class Launch(NamedTuple):
    """The command that starts a peer: a server of the OpenAI API at `{port}`, or a program of `inside/`."""

    argv: Sequence[str]
    env: Mapping[str, str] = {}  # on top of this process's
    version: str = ""  # of what runs, for the report
    note: str = ""  # what a reader must know of it
