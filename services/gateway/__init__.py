"""The gateway: the HTTP API in front of any number of engines.

It owns the OpenAI-compatible API, chat templates, tokenization, and each live request's tokens. It reaches engines
through `backend.py` only. It schedules nothing and never imports torch.
"""
