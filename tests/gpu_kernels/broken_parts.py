"""A part of the GPU's check that ends as no part should: its process crashes, hangs or raises."""

import os
import subprocess
import sys
import time

from benchmarks.gpu_check.report import Report, Row
from benchmarks.gpu_check.settings import Settings


def run(settings: Settings, report: Report) -> None:
    """End in the way that `settings.dtype` names."""
    report.add(Row("before", "1"))
    if settings.dtype == "crash":
        os._exit(3)
    if settings.dtype == "hang":
        child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"])
        report.note(str(child.pid))
        time.sleep(60)
    with report.check("within"):
        raise ValueError("no such thing\nand more")
    report.add(Row("after", "2"))
    raise KeyError("outside")
