"""Operations in C++, under the names and rules of their references; `kernels/cpu/extension.py` must have loaded them.

Arithmetic is in float32 whatever weights and cache are stored in. Token embeddings come out as float32, so that all
activations of a model are.
"""
