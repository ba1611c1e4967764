"""GGUF files as model folders: settings, tokenizer and the places of tensors, all read from a file's header.

A GGUF file keeps a whole model: settings, vocabulary, chat template and (mostly quantised) weights. `folder` makes of
its header what every other part of Quire reads: config.json, tokenizer.json and so on, and a pointer to the file.
Weights stay where they are; `tensors` says under which Hugging Face name and in which layout each part of them is
known, and `blocks` dequantises. Format, names and types come from the package `gguf`. Nothing here imports torch.
"""
