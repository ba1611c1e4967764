"""Hugging Face transformers, in process, on static batches."""

from pathlib import Path

from benchmarks.peers.environments import environment, pinned
from benchmarks.peers.launch import Launch, Place


def prepare(place: Place, dtype: str) -> Launch:
    """Return how to run it with weights of `dtype`. Raise `Skipped`."""
    programs = environment(place.folder / "transformers", ["install", pinned("torch"), pinned("transformers")])
    driver = Path(__file__).parent / "inside" / "drive_transformers.py"
    argv = [str(programs / "python"), str(driver), str(place.checkpoint), dtype, str(place.threads)]
    return Launch(argv, version=pinned("transformers"))
