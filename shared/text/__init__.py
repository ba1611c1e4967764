"""Turns text into tokens and back: tokenizer, chat template, incremental detokenizer, stop strings.

The gateway and `quire.LLM` use it. It knows nothing of HTTP, sockets, tensors or schedules. It never imports
torch, and imports transformers only for a model that has no tokenizer.json.
"""
