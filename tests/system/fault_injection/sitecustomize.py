"""Loaded by every Python process that finds this folder in PYTHONPATH, to make its surroundings worse than they are.

FAIL_METRICS=FILE: its wall clock is an hour earlier at each look, and its engine metrics cannot be collected while
that file is there. HIGH_WATER=N: so many messages may wait on a connection.
"""

import itertools
import os
import time
from collections.abc import Iterator
from pathlib import Path

from prometheus_client.core import Metric

import shared.transport
from shared.metrics import EngineCollector

_looks, _now, _collect = itertools.count(), time.time, EngineCollector.collect


def _earlier() -> float:
    return _now() - 3600.0 * next(_looks)


def _collect_or_fail(self: EngineCollector) -> Iterator[Metric]:
    if Path(os.environ["FAIL_METRICS"]).exists():
        raise RuntimeError("metrics are made to fail")
    return _collect(self)


if "FAIL_METRICS" in os.environ:
    time.time = _earlier
    EngineCollector.collect = _collect_or_fail  # type: ignore[method-assign]
if "HIGH_WATER" in os.environ:
    shared.transport.HIGH_WATER = int(os.environ["HIGH_WATER"])
