"""Quire, a server for large language models."""
