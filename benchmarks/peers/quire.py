"""Quire itself, over HTTP like the other servers, and in process, to compare with peers that have no server."""

import json
import sys
from pathlib import Path

from benchmarks.peers.environments import ROOT
from benchmarks.peers.launch import Launch, Place

Settings = dict[str, str]

ENV = {"PYTHONPATH": str(ROOT)}


def served(place: Place, settings: Settings) -> Launch:
    """Return how to start `quire serve` with these settings."""
    flags = [f"--{name.replace('_', '-')}={value}" for name, value in _with_model(place, settings).items()]
    argv = [sys.executable, "-m", "quire", "serve", "--host=127.0.0.1", "--port={port}"]
    return Launch([*argv, f"--served-model-name={place.name}", *flags], ENV)


def in_process(place: Place, settings: Settings) -> Launch:
    """Return how to run the same engine without the server."""
    driver = Path(__file__).parent / "inside" / "drive_quire.py"
    return Launch([sys.executable, str(driver), json.dumps(_with_model(place, settings))], ENV)


def _with_model(place: Place, settings: Settings) -> Settings:
    """Return the settings with the model's folder; the embedded model needs none, and is read from its GGUF file."""
    return settings if place.model.shape is None else {"model": str(place.checkpoint)} | settings
