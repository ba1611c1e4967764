"""Quire's own decoder: one set of layers that every family configures."""
