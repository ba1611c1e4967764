"""The scheduler: one process an engine, which decides what runs and where its KV is. No torch, no text, no tensors."""
