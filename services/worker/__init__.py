"""The worker: one process for one device. It holds weights and KV memory, computes steps and samples tokens.

Which sequence runs, in which slot and in which blocks, is the scheduler's to say.
"""

import os

# A thread that waits for the others must not spin for long: the worker shares its cores with the gateway, the
# scheduler and the clients, and spinning keeps the very thread that it waits for from running. Half a millisecond
# bridges the gaps within a step; libgomp's own default is thirty times that (benchmarks/results/worker_threads.md).
# It is read when torch is loaded, so it stands before any import of it; a user's own settings hold.
if "OMP_WAIT_POLICY" not in os.environ:
    os.environ.setdefault("GOMP_SPINCOUNT", "10000")
