"""The worker: one process for one device. It holds weights and KV memory, computes steps and samples tokens.

Which sequence runs, in which slot and in which blocks, is the scheduler's to say.
"""

import os

# Threads that wait must sleep: they share the cores with the gateway, the scheduler and the clients, and a spinning
# one keeps the thread that it waits for from running (measured on two busy cores: 228 ms instead of 3 for 30 matrix
# products). OpenMP reads this when torch is loaded, so it stands before any import of it; a user's own setting holds.
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
