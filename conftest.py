"""Seeds what draws random numbers before each test, so that it draws the same ones alone and in any order.

Some compare rounded results: once in hundreds of runs, a number is halfway between two others.
"""

import random
import sys

import pytest


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup() -> None:
    """Seed for the fixtures of a test."""
    _seed()


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_call() -> None:
    """Seed for the test, whatever the fixtures have drawn that were made for it, and not for an earlier one."""
    _seed()


def _seed() -> None:
    random.seed(0)
    for name, seed in (("torch", "manual_seed"), ("numpy.random", "seed")):
        if name in sys.modules:
            getattr(sys.modules[name], seed)(0)
