"""The worker: one process for one device. It holds weights and KV memory, computes steps and samples tokens.

The scheduler decides which sequence runs, in which slot and in which blocks.
"""

import os

# A thread that waits for others must not spin for long: the worker shares its cores with the gateway, the scheduler
# and the clients, and a spinning thread may keep the one that it waits for from running. Half a
# millisecond bridges the gaps within a step; libgomp's default is thirty times that
# (benchmarks/results/worker_threads.md). libgomp reads the variable when torch is loaded, so it is set before torch is
# imported. A user's setting is kept.
if "OMP_WAIT_POLICY" not in os.environ:
    os.environ.setdefault("GOMP_SPINCOUNT", "10000")
