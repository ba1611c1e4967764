"""Serves GGUF files as if they were model folders of Hugging Face's.

A GGUF file holds a whole model: metadata, vocabulary, chat template and (mostly quantised) weights. `folder` turns the
header into the files that the rest of Quire reads (config.json, tokenizer.json and so on), and a pointer to the GGUF
file, where the weights stay. `tensors` maps Hugging Face's names and layouts to the tensors, and `tensor_data` reads
and dequantises them. The package `gguf` defines formats, names and types. Nothing here imports torch.
"""
