"""The worker: one process for one device. It holds weights and KV memory, computes steps and samples tokens.

The scheduler decides which sequence runs, in which slot and in which blocks.
"""
