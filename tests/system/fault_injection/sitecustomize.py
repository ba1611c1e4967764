"""Injects faults into every Python process that has this folder in PYTHONPATH, by environment variables.

FAIL_METRICS=FILE: the wall clock goes back by an hour at each look, and engine metrics cannot be collected while FILE
exists. HIGH_WATER=N: at most N messages may wait on a connection.
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
