"""The gateway: HTTP in front of any number of engines.

Owns the OpenAI-compatible API, chat templates and tokens to text, and each live request's tokens. Knows engines only
through `backend.py`; schedules nothing and never imports torch.
"""
