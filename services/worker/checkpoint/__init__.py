"""Reading of a checkpoint: bytes on disk become a parsed config and named tensors."""
