"""The worker: one process for one device. It holds weights and KV memory, computes steps and samples tokens.

Which sequence runs, in which slot and in which blocks, is the scheduler's to say.
"""
