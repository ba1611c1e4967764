"""Reads a checkpoint: bytes on disk become named tensors."""
