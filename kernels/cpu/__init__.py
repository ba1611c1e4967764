"""Operations in C++; `ops.py` lists them, and `extension.py` loads the library that has them.

Arithmetic is in float32 whatever weights and cache are stored in. Token embeddings come out as float32, so that all
activations of a model are. Formulas and rules stand with the functions of the same names in `kernels/reference`.
"""
