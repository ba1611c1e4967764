"""Adapters (LoRA): reading them, keeping them in host memory, and putting them into the device's slots."""
