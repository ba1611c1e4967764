"""GGUF files as model folders. Configuration, tokenizer and the offsets of tensors are read from a file's header.

A GGUF file holds a whole model: metadata, vocabulary, chat template and (mostly quantised) weights. `folder` turns its
header into the files that the rest of Quire reads (config.json, tokenizer.json and so on) and a pointer to the GGUF
file, where the weights stay. `tensors` finds them under Hugging Face's names and in its layouts, and `tensor_data`
reads and dequantises them. Format, names and types come from the package `gguf`. Nothing here imports torch.
"""
