"""Between text and tokens: tokenizer, chat template, incremental detokenizer, stop strings.

Used by the gateway and by the offline `LLM`; knows nothing of HTTP, sockets, tensors or schedules. Loading it imports
neither torch nor transformers; the latter is imported only for a model that has no tokenizer.json.
"""
