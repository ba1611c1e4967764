"""`python -m services.worker`: a worker as a process, or all ranks of a group as one process each."""

import os
import sys
from collections.abc import Sequence

from services.worker.config import WorkerConfig
from services.worker.local_ranks import run_ranks
from services.worker.service import serve
from shared.config import load
from shared.curve import load_connection_keys
from shared.errors import QuireError
from shared.startup import configure_logging, end_with_supervisor, report_error, start_logging
from shared.transport import check_exposure


def main(argv: Sequence[str]) -> int:
    """Load the model and serve until told to stop. Return the exit status."""
    _spin_briefly()
    start_logging()
    try:
        config = load(WorkerConfig, argv, os.environ, prog="python -m services.worker")
        in_group = config.parallel.world_size > 1
        name = f"worker rank {config.rank}" if in_group and config.rank is not None else "worker"
        configure_logging(name, config.log_level, config.log_format)
        end_with_supervisor(config.supervisor)
        keys = load_connection_keys(config.zmq_keys, "worker")  # before seconds are spent on a model
        check_exposure(config.scheduler, protected=config.insecure or keys is not None)
        if in_group and config.rank is None:
            return run_ranks(config, argv)
        from services.worker.cpu_tuning import pin_threads  # these import torch, which takes seconds
        from services.worker.start import start_runner

        runner = start_runner(config)
        status = serve(config, runner, keys, on_configured=pin_threads if runner.device.type == "cpu" else None)
        if in_group:
            os._exit(status)  # at a usual exit, torch might wait for ranks that are gone
        return status
    except QuireError as error:
        return report_error("worker", error)


def _spin_briefly() -> None:
    """Let no compute thread that waits for others spin for long, unless the user decides that.

    The worker shares its CPUs with the gateway, the scheduler and the clients, and a spinning thread may keep the one
    that it waits for from running. Half a millisecond bridges the gaps within a step; libgomp's default is thirty times
    that (benchmarks/results/worker_threads.md). libgomp reads the variable when torch is loaded.
    """
    if "OMP_WAIT_POLICY" not in os.environ:
        os.environ.setdefault("GOMP_SPINCOUNT", "10000")


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
