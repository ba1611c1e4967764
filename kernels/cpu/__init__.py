"""Versions for the CPU of operations whose reference is too slow there, or whose bits hang on the batch."""
