"""Serves jobs on stdin: each is a line of JSON, answered by a line of JSON on stdout.

Whatever a library prints goes to stderr. This runs inside each peer's own environment: the standard library alone.
"""

import json
import os
import sys
from collections.abc import Callable, Mapping
from typing import Any

Answer = Callable[[dict[str, Any]], Mapping[str, Any]]


def answer(load: Callable[[], Answer]) -> None:
    """Load, report that, and answer jobs until stdin ends."""
    channel = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    work = load()
    print(json.dumps({"ready": True}), file=channel, flush=True)
    for line in sys.stdin:
        print(json.dumps(work(json.loads(line))), file=channel, flush=True)
