"""The real worker, with a gate in front of each step, and a delay that makes outputs last a while.

python tests/chaos/gated_worker.py FOLDER DELAY [flags of the worker]
"""

import sys
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from services.worker.config import WorkerConfig
from services.worker.interface import PendingStep, Runner, WorkerInfo
from services.worker.service import serve
from services.worker.start import start_runner
from shared.config import load
from shared.curve import load_connection_keys
from shared.protocol import Configure, StepPlan
from shared.startup import end_with_supervisor, start_logging
from tests.chaos.gate import Gate, Slots


class GatedRunner:
    """A runner that waits at the gate, and `delay` seconds, before each step."""

    def __init__(self, runner: Runner, gate: Gate, delay: float) -> None:
        self._runner = runner
        self._gate = gate
        self._delay = delay
        self._slots = Slots()

    @property
    def info(self) -> WorkerInfo:
        return self._runner.info

    def configure(self, message: Configure) -> None:
        self._slots = Slots()
        self._runner.configure(message)

    def launch(self, plan: StepPlan) -> PendingStep:
        self._slots.apply(plan)
        hold = self._gate.read()
        if hold is not None and self._slots.matches(plan, hold):
            self._gate.wait(hold)
        time.sleep(self._delay)
        return self._runner.launch(plan)


def main(folder: str, delay: str, *argv: str) -> int:
    start_logging()
    config = load(WorkerConfig, argv, {}, prog="gated_worker.py")
    end_with_supervisor(config.supervisor)
    runner = GatedRunner(start_runner(config), Gate(Path(folder)), float(delay))
    return serve(config, runner, load_connection_keys(config.zmq_keys, "worker"))


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
